// `zero explain`: shows where parameters, gradients and optimizer states are stored and how they are transferred in
// each phase of a step, for one configuration. The tables come from the engine's step program (plan/schedule.h). With
// --live the same steps are run on ranks, and the command fails if they differ; this requires `zero-torch`.
#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include <zero/config_tools.h>
#include <zero/plan.h>

#include "base/check.h"
#include "base/log.h"
#include "base/system.h"
#include "config/batch.h"
#include "config/document.h"
#include "config/settings.h"
#include "plan/model.h"
#include "plan/model_pass.h"
#include "plan/topology.h"
#include "tools/commands.h"
#include "tools/explain/live_ranks.h"
#include "tools/explain/text.h"
#include "tools/report/text/axis_bytes.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"
#include "tools/support/console.h"
#include "tools/support/expert_options.h"
#include "tools/support/gpt_plan.h"
#include "tools/support/options.h"

namespace zero::cli {
namespace {

using config::OffloadDevice;

// Larger models would take minutes.
constexpr std::int64_t kMostLiveParameters = 30'000'000;

struct Request {
  std::vector<std::string> words;
  std::string config;
  std::vector<std::pair<std::string, std::string>> set;
  bool strict = false;
  std::string recipe, transport, device = "cpu", model;
  std::int64_t world = 2, accumulation = 0, layers = 0, hidden = 0, heads = 0, sequence = 0, vocabulary = 0;
  std::int64_t tensor_parallel = 0, sequence_parallel = 0;
  ExpertArguments experts;
  bool live = false;
};

void declare(Command& c, Request& r) {
  c.positionals(r.words, "WHAT",
                "stage 0|1|2|3, offload, infinity; or \"stage 3 offload\"; without any, the configuration as it is",
                false);
  c.section("Configuration");
  c.config(r.config, r.set, r.strict);
  c.choice("--dtype", r.recipe, {"fp32", "bf16", "fp16"}, "recipe (the configuration's, else bf16)");
  c.option("--accumulation", r.accumulation, "N", "micro-batches per step (the configuration's, else 1)", 1, 1024);
  c.section("Ranks");
  c.option("--world", r.world, "N", "ranks (2)", 1, 1 << 20);
  c.choice("--transport", r.transport, {"thread", "shm", "gloo", "shm+gloo", "nccl"},
           "transport between ranks (shm: shared memory of one host; nccl with --device cuda)");
  c.choice("--device", r.device, {"cpu", "cuda"}, "device of a rank (cpu)");
  c.option("--tensor-parallel", r.tensor_parallel, "T", "ranks that share one copy of the cut weights (1)", 1, 65536);
  c.option("--sequence-parallel", r.sequence_parallel, "U", "ranks that share the tokens of a sample (1)", 1, 65536);
  declare_experts(c, r.experts);
  c.section("Model");
  c.option("--model", r.model, "NAME", "gpt2, bert-base, llama-3-8b, ... (the configuration's, else a small GPT)");
  c.option("--layers", r.layers, "N", "blocks (2)", 1, 1000);
  c.option("--hidden", r.hidden, "N", "width (64)", 1, 65536);
  c.option("--heads", r.heads, "N", "attention heads (4)", 1, 1024);
  c.option("--sequence", r.sequence, "N", "tokens per sample (32)", 1, 1 << 20);
  c.option("--vocabulary", r.vocabulary, "N", "vocabulary size (256)", 2, 1 << 24);
  c.section("Check");
  c.flag("--live", r.live, "run three steps on ranks, and fail (exit 1) if they differ from the schedule");
}

// The positional arguments, read from left to right.
struct Asked {
  int stage = -1;
  bool offload = false, infinity = false;
};

Asked read_words(const std::vector<std::string>& words) {
  Asked asked;
  const auto fail = [](const std::string& got, const std::string& expected, const std::string& hint = "") {
    throw ConfigError("[zero explain] got " + got + ", expected " + expected + (hint.empty() ? "" : ". Hint: " + hint));
  };
  for (std::size_t i = 0; i < words.size(); ++i) {
    const auto& word = words[i];
    if (word == "stage") {
      const auto number = i + 1 < words.size() ? words[++i] : std::string();
      if (number.size() != 1 || number[0] < '0' || number[0] > '3')
        fail(number.empty() ? "stage without a number" : "stage " + number.substr(0, 40), "stage 0, 1, 2 or 3",
             "zero explain stage 3");
      if (asked.stage >= 0) fail("two stages", "one");
      asked.stage = number[0] - '0';
    } else if (word == "offload") {
      asked.offload = true;
    } else if (word == "infinity") {
      asked.infinity = true;
    } else if (word.size() == 6 && word.starts_with("stage") && word[5] >= '0' && word[5] <= '3') {
      if (asked.stage >= 0) fail("two stages", "one");
      asked.stage = word[5] - '0';
    } else {
      const auto near = nearest_name(word, {"stage", "offload", "infinity"});
      fail("\"" + word.substr(0, 80) + "\"", "stage N, offload or infinity",
           near.empty() ? "zero explain --help" : "did you mean \"" + near + "\"?");
    }
  }
  if (asked.infinity && asked.stage >= 0 && asked.stage != 3)
    fail(base::join("infinity at stage ", asked.stage), "stage 3", "leave the stage out");
  if (asked.offload && asked.stage == 0) fail("offload at stage 0", "stage 1, 2 or 3");
  return asked;
}

// A temporary folder, removed by the destructor.
class Scratch {
 public:
  Scratch() {
    auto name = (base::temporary_folder() / "zero-explain-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr)
      throw IoError(base::join("[zero explain] cannot make the temporary folder ", name, ": ", std::strerror(errno),
                               ". Hint: set TMPDIR to a folder that you may write."));
    path_ = name;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Completes the configuration: keys that the file does not set are derived from the positional arguments.
void complete(LiveTask& task, const Request& request, const std::vector<Setting>& experts, const Asked& asked,
              const std::string& folder) {
  const auto add = [&](const char* key, const std::string& value, const char* source) {
    task.settings.push_back({key, value, source, false});
  };
  if (request.config.empty()) {
    Json text = {{"train_micro_batch_size_per_gpu", 1},
                 {"gradient_accumulation_steps", std::max<std::int64_t>(request.accumulation, 1)},
                 {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-3}}}}}};
    if (request.recipe != "fp32") text[request.recipe.empty() ? "bf16" : request.recipe]["enabled"] = true;
    task.text = text.dump();
  } else {
    task.config = request.config;
    if (request.accumulation > 0)
      add("gradient_accumulation_steps", std::to_string(request.accumulation), "--accumulation");
    if (!request.recipe.empty()) {
      add("bf16.enabled", request.recipe == "bf16" ? "true" : "false", "--dtype");
      add("fp16.enabled", request.recipe == "fp16" ? "true" : "false", "--dtype");
    }
  }
  if (asked.stage >= 0) add("zero_optimization.stage", std::to_string(asked.stage), "command line");
  if (request.tensor_parallel > 0)
    add("tensor_parallel.autotp_size", std::to_string(request.tensor_parallel), "--tensor-parallel");
  if (request.sequence_parallel > 0)
    add("sequence_parallel_size", std::to_string(request.sequence_parallel), "--sequence-parallel");
  task.settings.insert(task.settings.end(), experts.begin(), experts.end());
  const auto with_sets = [&](LiveTask some) {
    for (const auto& [key, value] : request.set) some.settings.push_back({key, value, "--set", false});
    return some;
  };
  // --set may be valid only together with keys derived from the arguments, or vice versa. Read as much as is valid.
  const auto given = [&] {
    try {
      return with_sets(task).options();
    } catch (const ConfigError&) {
      return task.options();
    }
  }();
  const auto sets = [&](const std::string& key) {
    return std::any_of(request.set.begin(), request.set.end(), [&](const auto& one) { return one.first == key; });
  };
  const auto says = [&](const std::string& key) { return given.document().is_set(key) || sets(key); };
  const auto& zero = given.settings().zero;
  if (given.settings().optimizer.type == config::OptimizerType::None && !says("optimizer.type"))
    add("optimizer.type", "AdamW", "zero explain");
  if (asked.infinity && zero.stage != 3) add("zero_optimization.stage", "3", "command line");
  if (asked.offload && zero.stage == 0 && !asked.infinity) add("zero_optimization.stage", "2", "command line");
  if (asked.infinity) {
    for (const std::string block : {"zero_optimization.offload_optimizer.", "zero_optimization.offload_param."}) {
      if (!sets(block + "device")) add((block + "device").c_str(), "nvme", "command line");
      if (!says(block + "nvme_path")) add((block + "nvme_path").c_str(), folder, "command line");
    }
    if (!says("zero_optimization.offload_param.max_in_cpu"))
      add("zero_optimization.offload_param.max_in_cpu", "0", "command line");
  } else if (asked.offload && !says("zero_optimization.offload_optimizer.device")) {
    add("zero_optimization.offload_optimizer.device", "cpu", "command line");
  }
  task = with_sets(std::move(task));
}

PlanModel model_of(const Request& r, const Options& options) {
  PlanModel model;
  const auto& block = options.settings().model;
  if (!r.model.empty())
    model = PlanModel::named(r.model);
  else if (!r.config.empty() || block.layers > 0 || block.hidden > 0)
    model = PlanModel::of_options(options);
  else
    model = {.kind = PlanModel::Kind::Gpt,
             .name = "",
             .layers = 2,
             .hidden = 64,
             .heads = 4,
             .sequence = 32,
             .vocabulary = 256};
  const auto published = model.num_parameters();
  const bool other = r.layers > 0 || r.hidden > 0 || r.heads > 0 || r.sequence > 0 || r.vocabulary > 0;
  if (other && model.kind != PlanModel::Kind::Gpt)
    throw ConfigError("[zero explain] got a shape for --model " + r.model + ", expected one for a GPT");
  if (r.layers > 0) model.layers = r.layers;
  if (r.hidden > 0) model.hidden = r.hidden;
  if (r.heads > 0) model.heads = r.heads;
  if (r.sequence > 0) model.sequence = r.sequence;
  if (r.vocabulary > 0) model.vocabulary = r.vocabulary;
  model.experts = planning::experts_of(options.settings().model.experts);
  model.validate();
  if (model.num_parameters() != published) model.name.clear();
  return with_gpt_pass(std::move(model));
}

std::string title_of(const config::ZeroSettings& zero) {
  const auto place = [](OffloadDevice device) { return device == OffloadDevice::Nvme ? "files" : "host memory"; };
  const bool optimizer = zero.stage >= 1 && zero.offload_optimizer.device != OffloadDevice::None;
  const bool parameters = zero.stage == 3 && zero.offload_param.device != OffloadDevice::None;
  std::string title = base::join("ZeRO stage ", zero.stage);
  if (optimizer) title += base::join(", optimizer states in ", place(zero.offload_optimizer.device));
  if (parameters) title += base::join(", parameters in ", place(zero.offload_param.device));
  if (zero.delayed_update.enabled && optimizer)
    title += base::join(", updates delayed by one step from step ", zero.delayed_update.start_step);
  return title;
}

std::string model_text(const PlanModel& model) {
  const auto count = report::human_parameters(static_cast<double>(model.num_parameters()));
  if (model.kind != PlanModel::Kind::Gpt) return model.name + ", " + count + " parameters";
  return base::join(model.name.empty() ? "GPT" : model.name, " of ", count, " parameters, ", model.layers,
                    " layers, hidden ", model.hidden);
}

// All of "tp", of "sp" and of "ep" in the forward and in the backward of a micro-batch.
Activations of_phases(const std::vector<planning::Exchange>& exchanges) {
  Activations all;
  for (const auto& exchange : exchanges) {
    const auto phase = exchange.phase == "forward" ? planning::Phase::Forward : planning::Phase::Backward;
    auto& sum = all[phase][exchange.operation.substr(0, 2)];
    sum.calls += static_cast<std::uint64_t>(exchange.calls);
    sum.bytes += static_cast<std::uint64_t>(exchange.bytes);
  }
  return all;
}

}  // namespace

int explain(int argc, char** argv) {
  Request request;
  Command command(
      "explain", "where states are stored and how they are transferred in each phase of a step", "[WHAT...] [options]",
      "  zero explain stage 3 --world 4 --layers 4 --hidden 128\n  zero explain offload --config ds.json --live\n");
  declare(command, request);
  if (!command.parse(argc, argv)) return 0;
  const auto& global = command.global();
  install_log_sink("explain", global);
  const auto asked = read_words(request.words);
  const bool gpu = request.device == "cuda";
  std::unique_ptr<Scratch> scratch;
  if (request.live) scratch = std::make_unique<Scratch>();

  LiveTask task;
  complete(task, request, expert_settings(command, request.experts), asked, scratch ? scratch->path() : "/tmp");
  const auto options = task.options();
  require_experts(request.experts, options);
  if (request.strict && !options.notices().empty())
    throw ConfigError("[--strict] got a notice: " + options.notices().front());
  config::require_built(options);
  const auto& settings = options.settings();
  const int world = static_cast<int>(request.world);
  std::string transport = request.transport;
  if (transport.empty()) transport = gpu ? "nccl" : settings.transport == "auto" ? "shm" : settings.transport;
  if ((transport == "nccl") != gpu && world > 1)
    throw ConfigError("[--transport] got " + transport + " with --device " + request.device + ", expected " +
                      (gpu ? "nccl" : "shm, gloo, shm+gloo or thread"));
  const auto shape = config::mesh_shape(options, world);
  config::require_expert_ranks(options, world);
  const int ranks = world / shape.tensor;  // that ZeRO shards over
  const auto asked_transport = transport;
  if (ranks == 1) transport = "local";
  const auto model = model_of(request, options);
  const auto batch = config::resolve_batch(options, world);

  for (const auto& notice : planning::check_patterns(model, settings)) base::log(LogLevel::Warning, notice);
  planning::ScheduleInput input;
  input.parameters = planning::parts_of(model, settings);
  const auto segments = planning::segments_of(options, model.layers);
  input.pass = planning::pass_of(model, input.parameters, segments);
  const int ep_size = model.experts.ep_size;
  input.topology = planning::topology_of(ranks, transport, gpu, /*deferred_init=*/!gpu, ep_size);
  input.topology.tensor_rank = shape.tensor - 1;
  input.freedom = step::placement_freedom(step::ShardingPolicy::of_stage(settings.zero.stage), gpu,
                                          [&](const char* key) { return options.document().is_set(key); });
  // The order of use is known in the third step. Delayed updates begin at the configured step.
  const auto first = settings.zero.delayed_update.enabled ? settings.zero.delayed_update.start_step : 0;
  const auto schedule = planning::schedule(input, settings, batch.accumulation, first, 3);

  Explained what;
  what.title = title_of(settings.zero);
  what.recipe = settings.precision == config::Precision::Bf16   ? "bf16"
                : settings.precision == config::Precision::Fp16 ? "fp16"
                                                                : "fp32";
  what.optimizer = planning::name(settings.optimizer.type);
  what.model = model_text(model);
  what.transport = transport;
  for (const auto& parameter : input.parameters) what.parameters += parameter.numel;
  what.ranks = world;
  what.experts = model.experts;
  what.expert_layers = planning::expert_layers(model);
  what.data_before_experts = settings.mesh.data_before_experts;
  if (shape.tensor * shape.sequence * ep_size > 1) {
    what.mesh = report::degrees_text({shape.data, shape.sequence, shape.tensor, ep_size});
    const auto share = planning::share_of(model, settings, input.parameters);
    what.exchanges = planning::exchanges_of({.model = model,
                                             .settings = settings,
                                             .share = share,
                                             .samples = batch.micro,
                                             .segments = segments,
                                             .element = schedule.parameter_width});
    for (auto& product : planning::split_products(share, batch.micro, schedule.parameter_width))
      if (what.products.empty() || product.unit == what.products.front().unit)
        what.products.push_back(std::move(product));
  }
  what.gpu = gpu;
  what.delayed = std::any_of(schedule.events.begin(), schedule.events.end(),
                             [](const auto& e) { return e.phase == planning::Phase::Background; });
  const auto columns = static_cast<std::size_t>(report::describe_terminal(1, global.color).columns);

  if (!request.live) {
    print_result(global.json ? explain_json(schedule, what).dump(2, ' ', false, Json::error_handler_t::replace) + "\n"
                             : explain_text(schedule, what, columns));
    return 0;
  }
  if (gpu)
    throw ConfigError("[--live] got --device cuda, expected cpu. Hint: leave --live out; script/gpu-check runs GPUs.");
  if (model.kind != PlanModel::Kind::Gpt || what.parameters > kMostLiveParameters || world > 16 ||
      transport == "shm+gloo")
    throw ConfigError(base::join(
        "[--live] got ", what.model, " on ", world, " ranks over ", transport, ", expected a GPT of at most ",
        kMostLiveParameters, " parameters on at most 16 ranks of this host. Hint: --layers 2 --hidden 64 --world 2"));
  if (run_live == nullptr) throw InternalError("[--live] got a program without libtorch, expected zero-torch");
  task.gpt = {.layers = model.layers,
              .hidden = model.hidden,
              .heads = model.heads,
              .sequence = model.sequence,
              .vocabulary = model.vocabulary,
              .tied_output = model.tied};
  task.folder = scratch->path();
  task.transport = world > 1 && ranks == 1 ? asked_transport : transport;
  task.world = world;
  const auto run = run_live(task, global);
  LiveExpectation expected{.of_tensor_rank = {}, .sequence = shape.sequence, .activations = of_phases(what.exchanges)};
  for (int j = 0; j < shape.tensor; ++j) {
    auto of_rank = input;
    of_rank.parameters = planning::parts_of(model, settings, j);
    of_rank.pass = planning::pass_of(model, of_rank.parameters, segments);
    of_rank.topology =
        planning::topology_of(ranks, ranks == 1 ? "local" : run.transport, gpu, /*deferred_init=*/true, ep_size);
    of_rank.topology.tensor_rank = j;
    expected.of_tensor_rank.push_back(planning::schedule(of_rank, settings, batch.accumulation, run.first_step,
                                                         static_cast<int>(run.overflowed.size()), run.overflowed));
  }
  const auto& of_run = expected.of_tensor_rank.back();
  const auto difference = first_difference(expected, run);
  if (global.json) {
    auto document = explain_json(schedule, what);
    document["live"] = live_json(of_run, run, difference);
    print_result(document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  } else {
    print_result(explain_text(schedule, what, columns) +
                 live_text(of_run, expected.activations, run, difference, columns));
  }
  if (difference.empty()) return 0;
  print_error("explain", "[--live] the run differs from the schedule: " + difference);
  return static_cast<int>(ExitCode::kFailed);
}

}  // namespace zero::cli

int zero_explain(int argc, char** argv) { return zero::cli::explain(argc, argv); }
