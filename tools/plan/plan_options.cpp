// See plan_options.h. Flags take precedence over the configuration file, and bandwidths over the profile.
#include "tools/plan/plan_options.h"

#include <cmath>
#include <fstream>
#include <numeric>
#include <sstream>
#include <utility>

#include <zero/errors.h>

#include "config/byte_count.h"
#include "config/document.h"
#include "config/optimizers.h"
#include "config/settings.h"
#include "plan/model.h"
#include "tools/support/gpt_plan.h"

namespace zero::cli {
namespace {

// Defaults of the plan; the learning rate does not affect it.
constexpr const char* kDefaults = R"({
  "train_micro_batch_size_per_gpu": 1,
  "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}}
})";
constexpr std::uint64_t kContext = std::uint64_t{1} << 30;  // reserved on a GPU for CUDA and its libraries

std::uint64_t bytes_of(const char* flag, const std::string& text) {
  const auto bytes = config::byte_count(text);
  if (!bytes)
    throw ConfigError("[" + std::string(flag) + "] got \"" + text.substr(0, 40) +
                      "\", expected a size such as 32GB, 80GiB or 1.5TB");
  return static_cast<std::uint64_t>(*bytes);
}

double rate_of(const char* flag, std::string text) {
  const auto given = text;
  if (text.size() > 2 && text.compare(text.size() - 2, 2, "/s") == 0) text.resize(text.size() - 2);
  const auto bytes = config::byte_count(text);
  if (!bytes || *bytes == 0)
    throw ConfigError("[" + std::string(flag) + "] got \"" + given.substr(0, 40) +
                      "\", expected bytes a second such as 25GB/s");
  return static_cast<double>(*bytes);
}

// "7.5e9", "7.5B", "350M", "1T"
double count_of(const std::string& text) {
  std::size_t used = 0;
  double value = 0;
  try {
    value = std::stod(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  const auto unit = text.substr(used);
  const double factor = unit.empty()                 ? 1
                        : unit == "K" || unit == "k" ? 1e3
                        : unit == "M" || unit == "m" ? 1e6
                        : unit == "B" || unit == "G" ? 1e9
                        : unit == "T"                ? 1e12
                                                     : 0;
  if (used == 0 || factor == 0 || !std::isfinite(value))
    throw ConfigError("[--params] got \"" + text.substr(0, 40) + "\", expected a number such as 7.5e9, 7.5B or 350M");
  return value * factor;
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in)
    throw IoError("[--profile] got no file " + path + ", expected a profile. Hint: zero bench profile --out FILE");
  return text.str();
}

// Empty: all.
std::vector<int> stages_of(const PlanArguments& a) {
  std::vector<int> stages;
  if (a.stage == "all") return stages;
  std::istringstream parts(a.stage);
  for (std::string part; std::getline(parts, part, ',');) {
    if (part.size() != 1 || part[0] < '0' || part[0] > '3')
      throw ConfigError("[--stage] got \"" + a.stage.substr(0, 40) + "\", expected all, or 0 to 3 with commas between");
    stages.push_back(part[0] - '0');
  }
  return stages;
}

PlanModel model_of(const Command& c, const PlanArguments& a, const Options& options, bool from_file) {
  const bool shape = c.given("--layers") || c.given("--hidden");
  const int ways = (a.params.empty() ? 0 : 1) + (a.model.empty() ? 0 : 1);
  if (ways > 1 || (!a.params.empty() && shape))
    throw ConfigError(
        "[zero plan] got more than one of --params, --model and --layers with --hidden, expected one model");
  PlanModel model;
  if (!a.params.empty()) {
    model = PlanModel::of_count(count_of(a.params));
  } else if (!a.model.empty()) {
    model = PlanModel::named(a.model);
  } else if (shape) {
    if (!c.given("--layers") || !c.given("--hidden"))
      throw ConfigError("[zero plan] got " +
                        std::string(c.given("--layers") ? "--layers without --hidden" : "--hidden without --layers") +
                        ", expected both");
    model.heads = std::max<std::int64_t>(1, a.hidden / (a.hidden >= 4096 ? 128 : 64));
  } else if (from_file) {
    model = PlanModel::of_options(options);
  } else {
    throw ConfigError(
        "[zero plan] got no model, expected --params, --model, --layers with --hidden, or a configuration");
  }
  const auto published = shape ? 0 : model.num_parameters();
  const auto replace = [&](const char* flag, std::int64_t& field, std::int64_t value) {
    if (c.given(flag)) field = value;
  };
  replace("--layers", model.layers, a.layers);
  replace("--hidden", model.hidden, a.hidden);
  replace("--heads", model.heads, a.heads);
  replace("--vocab", model.vocabulary, a.vocabulary);
  replace("--seq", model.sequence, a.sequence);
  if (a.untied) model.tied = false;
  model.experts = planning::experts_of(options.settings().model.experts);
  model.validate();
  if (model.num_parameters() != published) model.name.clear();
  return with_gpt_pass(std::move(model));
}

PlanMachine machine_of(const Command& c, const PlanArguments& a) {
  PlanMachine machine;
  machine.gpu = a.device == "cuda";
  if (c.given("--world") && (c.given("--hosts") && c.given("--devices")) && a.world != a.hosts * a.devices)
    throw ConfigError("[--world] got " + std::to_string(a.world) + " with " + std::to_string(a.hosts) + " hosts of " +
                      std::to_string(a.devices) + " devices, expected their product");
  // Most machines have eight GPUs per host; ranks on CPUs share one host.
  const std::int64_t world =
      a.world > 0 ? a.world : std::max<std::int64_t>(a.hosts, 1) * std::max<std::int64_t>(a.devices, 1);
  std::int64_t hosts = a.hosts, devices = a.devices;
  if (devices == 0) devices = hosts > 0 ? world / hosts : machine.gpu && world > 8 && world % 8 == 0 ? 8 : world;
  if (hosts == 0) hosts = world / std::max<std::int64_t>(devices, 1);
  if (hosts < 1 || hosts * devices != world)
    throw ConfigError("[--world] got " + std::to_string(world) + " ranks on " +
                      std::to_string(std::max<std::int64_t>(hosts, a.hosts)) + " hosts of " + std::to_string(devices) +
                      " devices, expected their product");
  machine.hosts = static_cast<int>(hosts);
  machine.ranks_per_host = static_cast<int>(devices);
  machine.shared_memory = !machine.gpu && hosts == 1 && world > 1;
  if (!a.memory.empty()) machine.device_bytes = bytes_of("--memory", a.memory);
  if (!a.host_memory.empty()) machine.host_bytes = bytes_of("--host-memory", a.host_memory);
  if (!a.nvme.empty()) machine.file_bytes = bytes_of("--nvme", a.nvme);
  if (machine.gpu && machine.device_bytes > 0)
    machine.reserved_bytes =
        a.reserve.empty() ? std::min(kContext, machine.device_bytes / 4) : bytes_of("--reserve", a.reserve);
  if (!a.profile.empty()) machine.profile = PlanProfile::from_json(read_file(a.profile), a.profile);
  auto& profile = machine.profile;
  if (!a.link.empty()) profile.link_bytes = rate_of("--link", a.link);
  if (!a.network.empty()) profile.network_bytes = rate_of("--network", a.network);
  if (!a.pcie.empty()) profile.host_link_bytes = rate_of("--pcie", a.pcie);
  if (!a.disk.empty()) profile.read_bytes = profile.write_bytes = rate_of("--disk", a.disk);
  if (!a.flops.empty()) profile.fp32 = profile.bf16 = profile.fp16 = {.flops = count_of(a.flops)};
  return machine;
}

std::vector<Setting> settings_of(const Command& c, const PlanArguments& a) {
  std::vector<Setting> all;
  if (c.given("--micro-batch-size"))
    all.push_back({"train_micro_batch_size_per_gpu", std::to_string(a.micro_batch_size), "CLI --micro-batch-size"});
  if (c.given("--accumulation"))
    all.push_back({"gradient_accumulation_steps", std::to_string(a.accumulation), "CLI --accumulation"});
  if (c.given("--optimizer")) all.push_back({"optimizer.type", a.optimizer, "CLI --optimizer"});
  if (c.given("--dtype")) {
    all.push_back({"bf16.enabled", a.dtype == "bf16" ? "true" : "false", "CLI --dtype"});
    all.push_back({"fp16.enabled", a.dtype == "fp16" ? "true" : "false", "CLI --dtype"});
  }
  if (c.given("--tensor-parallel"))
    all.push_back({"tensor_parallel.autotp_size", std::to_string(a.tensor_parallel), "CLI --tensor-parallel"});
  if (c.given("--sequence-parallel"))
    all.push_back({"sequence_parallel_size", std::to_string(a.sequence_parallel), "CLI --sequence-parallel"});
  for (auto& setting : expert_settings(c, a.experts)) all.push_back(std::move(setting));
  for (const auto& [key, value] : a.set) all.push_back({key, value, "CLI --set"});
  return all;
}

// The stages of a pipeline wait for the first and the last micro-batches: (p-1) / (m+p-1) of a step
// (arXiv:2104.04473, section 2.2).
[[noreturn]] void refuse_pipeline(const PlanArguments& a) {
  const auto stages = a.pipeline, micro = std::max<std::int64_t>(a.accumulation, 1), idle = stages - 1,
             of = micro + stages - 1;
  const auto divisor = std::gcd(idle, of);
  throw ConfigError("[--pipeline] got " + std::to_string(stages) +
                    ", expected 1. ZeRO shards what a pipeline would split, on any module; a pipeline needs a "
                    "Sequential and its own training loop. With " +
                    std::to_string(micro) + (micro == 1 ? " micro-batch" : " micro-batches") + " a step, " +
                    std::to_string(idle / divisor) + "/" + std::to_string(of / divisor) +
                    " of every rank's time would be idle. Hint: --stage 3, or --tensor-parallel");
}

}  // namespace

void declare_plan(Command& c, PlanArguments& a) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  c.positional(a.config_positional, "CONFIG.json", "configuration whose model and recipe are planned", false);
  c.section("Model");
  c.option("--params", a.params, "P", "number of parameters: 7.5e9, 7.5B, 350M");
  c.option("--model", a.model, "NAME", "gpt2, gpt2-xl, gpt3-175b, bert-large, t5-11b, llama-3-70b, ...");
  c.option("--layers", a.layers, "N", "layers of a GPT", 1, 100000);
  c.option("--hidden", a.hidden, "N", "hidden size of the GPT", 1, 10000000);
  c.option("--heads", a.heads, "N", "attention heads (hidden / 64 or 128)", 1, 1000000);
  c.option("--vocab,--vocabulary", a.vocabulary, "N", "vocabulary size (50257)", 2, kMost);
  c.option("--seq,--sequence", a.sequence, "N", "tokens per sample (1024)", 1, kMost);
  c.flag("--untied", a.untied, "the output layer has separate weights");
  c.section("Machine");
  c.option("-n,--world", a.world, "N", "ranks (1)", 1, 1 << 24);
  c.option("--hosts", a.hosts, "N", "hosts", 1, 1 << 20);
  c.option("--devices", a.devices, "N", "ranks per host (8 on GPUs, all on CPUs)", 1, 1 << 16);
  c.choice("--device", a.device, {"cuda", "cpu"}, "device of a rank (cuda)");
  c.option("--memory", a.memory, "SIZE", "memory of a device: 32GB, 80GiB; with --device cpu of a rank");
  c.option("--host-memory", a.host_memory, "SIZE", "memory of a host");
  c.option("--nvme", a.nvme, "SIZE", "disk space of a host");
  c.option("--reserve", a.reserve, "SIZE", "part of --memory reserved for CUDA and libraries (1GiB)");
  c.option("--profile", a.profile, "FILE", "speeds of the machine, from `zero bench profile`");
  c.option("--flops", a.flops, "F", "FLOP/s of a rank in training: 150T");
  c.option("--link", a.link, "RATE", "bandwidth between ranks of a host: 300GB/s");
  c.option("--network", a.network, "RATE", "bandwidth between hosts, per rank: 12.5GB/s");
  c.option("--pcie", a.pcie, "RATE", "bandwidth between a device and its host, one direction: 25GB/s");
  c.option("--disk", a.disk, "RATE", "bandwidth of a host's files, reads and writes: 3GB/s");
  c.section("Parallelism");
  c.option("--tensor-parallel", a.tensor_parallel, "T", "ranks that share one copy of the cut weights (1)", 1, 65536);
  c.option("--sequence-parallel", a.sequence_parallel, "U", "ranks that share the tokens of a sample (1)", 1, 65536);
  declare_experts(c, a.experts);
  c.option("--pipeline", a.pipeline, "P", "stages of a pipeline: refused, with the idle time it would have", 1, 65536);
  c.section("What to compare");
  c.option("--stage", a.stage, "S|all", "0, 1, 2, 3, or several: 2,3 (all)");
  c.choice("--offload", a.offload, {"all", "none", "cpu", "nvme"}, "tiers for offloaded states (all)");
  c.choice("--checkpointing", a.checkpointing, {"all", "on", "off"}, "activation checkpointing (all)");
  c.option("--micro-batch-size", a.micro_batch_size, "M", "samples per rank and forward (1)", 1, 1 << 24);
  c.option("--accumulation", a.accumulation, "K", "micro-batches per step (1)", 1, 1 << 24);
  c.choice("--dtype", a.dtype, {"fp32", "bf16", "fp16"}, "recipe (bf16)");
  c.option("--optimizer", a.optimizer, "TYPE", config::optimizer_names() + " (AdamW)");
  c.config(a.config, a.set, a.strict);
  c.section("Results");
  c.option("--write", a.write, "FILE", "write the recommended configuration for `zero train`");
  c.option("--nvme-path", a.nvme_path, "DIR", "directory for offloaded files in that configuration (/tmp)");
  c.option("--paper", a.paper, "NAME",
           "print a paper's tables instead: table1, table2, infinity, activations, volumes, examples, estimator, all");
  c.flag("--measure", a.measure, "with --paper table2: also train the largest models that fit a budget here");
  c.option("--budget", a.budget, "SIZE", "with --measure: memory of a rank (64MB)");
  c.option("--data-parallel", a.data_parallel, "N", "with --measure: data-parallel ranks (2)", 1, 64);
}

namespace {

// A file without batch sizes is planned for one sample per rank; DeepSpeed's scripts often set them in code.
Options read(const std::string& file, std::vector<Setting> settings) {
  auto options = Options::from_file(file, settings);
  const auto& document = options.document();
  for (const char* key : {"train_batch_size", "train_micro_batch_size_per_gpu"})
    if (document.is_set(key)) return options;
  settings.push_back({"train_micro_batch_size_per_gpu", "1", "zero plan"});
  return Options::from_file(file, settings);
}

}  // namespace

PlanQuestion question_of(const Command& c, const PlanArguments& a) {
  if (!a.config_positional.empty() && !a.config.empty())
    throw ConfigError("[zero plan] got " + a.config_positional + " and --config " + a.config +
                      ", expected one configuration");
  const auto& file = a.config_positional.empty() ? a.config : a.config_positional;
  PlanQuestion question;
  if (a.pipeline > 1) refuse_pipeline(a);
  const auto settings = settings_of(c, a);
  question.from_file = !file.empty();
  question.options = file.empty() ? Options::from_json(kDefaults, "<zero plan>", settings) : read(file, settings);
  if (a.strict && !question.options.notices().empty())
    throw ConfigError("[--strict] got a notice, expected none: " + question.options.notices().front());
  require_experts(a.experts, question.options);
  question.model = model_of(c, a, question.options, !file.empty());
  question.machine = machine_of(c, a);
  question.choices.stages = stages_of(a);
  if (a.offload != "all") question.choices.offloads = {a.offload};
  if (a.checkpointing != "all") question.choices.checkpointing = {a.checkpointing == "on"};
  if (question.choices.stages == std::vector<int>{0} && a.offload != "all" && a.offload != "none")
    throw ConfigError("[--offload] got " + a.offload +
                      " with stage 0, expected stage 1, 2 or 3: stage 0 keeps everything on the device");
  return question;
}

MeasuredModels measured_of(const Command& c, const PlanArguments& a) {
  constexpr std::uint64_t kLeast = 2'000'000, kMost = 64'000'000'000;
  if (a.paper != "table2")
    throw ConfigError("[" +
                      std::string(a.measure          ? "--measure"
                                  : a.budget.empty() ? "--data-parallel"
                                                     : "--budget") +
                      "] got " + (a.paper.empty() ? "no paper" : "--paper " + a.paper.substr(0, 40)) +
                      ", expected --paper table2 --measure: only that table is measured");
  if (!a.measure)
    throw ConfigError("[" + std::string(a.budget.empty() ? "--data-parallel" : "--budget") +
                      "] got no --measure, expected --paper table2 --measure");
  MeasuredModels asked;
  if (!a.budget.empty()) asked.budget = bytes_of("--budget", a.budget);
  if (asked.budget < kLeast || asked.budget > kMost)
    throw ConfigError("[--budget] got " + a.budget.substr(0, 40) + ", expected 2MB to 64GB a rank");
  if (c.given("--data-parallel")) asked.data = a.data_parallel;
  if (a.tensor_parallel > 0) {
    if (a.tensor_parallel != 1 && a.tensor_parallel != 2 && a.tensor_parallel != 4)
      throw ConfigError("[--tensor-parallel] got " + std::to_string(a.tensor_parallel) +
                        ", expected 1, 2 or 4 with --measure: the models have 4 heads");
    asked.tensor = {static_cast<int>(a.tensor_parallel)};
  }
  if (const auto stages = stages_of(a); !stages.empty()) asked.stages = stages;
  return asked;
}

}  // namespace zero::cli
