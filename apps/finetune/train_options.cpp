// Options of `zero train` and their combination with the configuration: an option overrides the file, and fills a value
// that the file sets to "auto"; values given by neither have the defaults of the help text.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <stdexcept>
#include <utility>

#include <zero/errors.h>

#include "apps/finetune/train.h"
#include "base/system.h"
#include "config/document.h"
#include "config/optimizers.h"
#include "config/settings.h"
#include "tools/support/gpt_experts.h"
#include "tools/support/gpt_mesh.h"
#include "tools/support/gpt_segments.h"

namespace zero::cli {
namespace {

// The shortest digits that read back as the same number.
std::string shown(double value) {
  char text[40];
  for (int digits = 6; digits <= 17; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, value);
    if (std::stod(text) == value) break;
  }
  return text;
}

std::vector<Setting> settings_of(const Command& c, const TrainArguments& a) {
  std::vector<Setting> all;
  const auto add = [&](const char* flag, const char* key, const std::string& value, bool only_auto = false) {
    if (c.given(flag)) all.push_back({key, value, std::string("CLI ") + flag, only_auto});
  };
  add("--stage", "zero_optimization.stage", std::to_string(a.stage));
  // A schedule that sets its own length keeps it, independent of the length of the run.
  add("--steps", "scheduler.params.total_num_steps", std::to_string(std::max<std::int64_t>(1, a.steps)), true);
  add("--warmup-steps", "scheduler.params.warmup_num_steps", std::to_string(a.warmup_steps));
  add("--micro-batch-size", "train_micro_batch_size_per_gpu", std::to_string(a.micro_batch_size));
  add("--tensor-parallel", "tensor_parallel.autotp_size", std::to_string(a.tensor_parallel));
  add("--sequence-parallel", "sequence_parallel_size", std::to_string(a.sequence_parallel));
  for (auto& setting : expert_settings(c, a.experts)) all.push_back(std::move(setting));
  for (auto& setting : model_settings(c, a.model)) all.push_back(std::move(setting));
  add("--optimizer", "optimizer.type", a.optimizer);
  add("--lr", "optimizer.params.lr", shown(a.lr));
  add("--weight-decay", "optimizer.params.weight_decay", shown(a.weight_decay));
  add("--keep-snapshot-every", "libzero.keep_snapshot_every", std::to_string(a.keep_snapshot_every));
  if (a.save_async) all.push_back({"checkpoint.writer.decoupled", "true", "CLI --save-async"});
  if (c.given("--dtype")) {
    all.push_back({"bf16.enabled", a.dtype == "bf16" ? "true" : "false", "CLI --dtype"});
    all.push_back({"fp16.enabled", a.dtype == "fp16" ? "true" : "false", "CLI --dtype"});
  }
  for (const auto& [key, value] : a.set) all.push_back({key, value, "CLI --set"});
  return all;
}

constexpr const char* kDefaultConfiguration = "<default of --model>";

// Empty: the default of --model.
std::string config_file(const TrainArguments& a) {
  if (!a.config_positional.empty() && !a.config.empty())
    throw ConfigError("[zero train] got " + a.config_positional + " and --config " + a.config +
                      ", expected one configuration");
  if (!a.config_positional.empty()) return a.config_positional;
  if (!a.config.empty()) return a.config;
  if (const char* file = std::getenv("ZERO_CONFIG"); file && *file) return file;
  if (!a.model.model.empty()) return "";
  throw ConfigError("[zero train] got no CONFIG.json, expected the path of a configuration. Hint: zero train --help");
}

// For a first try without a text file: English text that is part of every Debian system. Announced in the line that
// names the text.
std::string any_text() {
  const char* text = "/usr/share/common-licenses/GPL-3";
  if (std::filesystem::exists(text)) return text;
  throw ConfigError(
      "[zero train] got no text, expected a file to train on. Hint: give --text FILE, or libzero.data.text in the "
      "configuration; any text will do, it is read byte by byte.");
}

models::GptConfig model_of(const config::ModelSettings& m) {
  models::GptConfig model;
  try {
    model = models::GptConfig::preset(m.size);
    const auto replace = [](std::int64_t& field, std::int64_t value) {
      if (value != 0) field = value;
    };
    replace(model.layers, m.layers);
    replace(model.hidden, m.hidden);
    replace(model.heads, m.heads);
    replace(model.sequence, m.seq_length);
    replace(model.vocabulary, m.vocabulary);
    model.dropout = m.dropout;
    model.tied_output = m.tied;
    model.validate();
  } catch (const std::invalid_argument& error) {
    throw ConfigError(std::string("[libzero.model] ") + error.what());
  }
  if (model.vocabulary < 256)
    throw ConfigError("[libzero.model.vocabulary] got " + std::to_string(model.vocabulary) +
                      ", expected at least 256: the tokens of a text are its bytes");
  return model;
}

void plan_gpt(const TrainArguments& a, TrainPlan& plan) {
  plan.model = model_of(plan.options.settings().model);
  add_experts(plan.model, plan.options.settings().model.experts);
  plan.options = with_heads_whole(plan.options, plan.model);
  plan.segments = segments_of(plan.options, plan.model);
  plan.text = a.text.empty() ? plan.options.settings().data.text : a.text;
  if (plan.text.empty()) plan.text = any_text();
}

void plan_trace(const Command& c, const TrainArguments& a, TrainPlan& plan) {
  const auto from_env = [](const char* name) {
    const char* text = std::getenv(name);
    return std::string(text ? text : "");
  };
  plan.trace = a.trace.empty() ? from_env("ZERO_TRACE") : a.trace;
  if (plan.trace.empty()) {
    if (c.given("--trace-steps")) throw ConfigError("[--trace-steps] got no --trace, expected the file of the trace");
    return;
  }
  const bool given = c.given("--trace-steps");
  const std::string steps = given ? a.trace_steps : from_env("ZERO_TRACE_STEPS");
  if (given || !steps.empty())
    plan.trace_steps = TraceSteps::parse(steps, given ? "--trace-steps" : "ZERO_TRACE_STEPS");
  const auto folder = std::filesystem::absolute(plan.trace).parent_path();
  if (std::error_code error; !std::filesystem::is_directory(folder, error))
    throw ConfigError("[--trace] got " + plan.trace + ", expected a file in a folder that exists");
}

void require_no_steps(const Command& c, const TrainArguments& a) {
  for (const char* flag : {"--eval-every", "--save-every", "--weights-only-every", "--keep-snapshot-every"})
    if (c.given(flag))
      throw ConfigError(std::string("[") + flag + "] got --steps 0, expected steps. Hint: leave " + flag + " out.");
  if (!a.checkpoint_dir.empty() && a.resume.empty())
    throw ConfigError("[--checkpoint-dir] got --steps 0, which saves nothing, expected --resume with it");
}

}  // namespace

void declare_train(Command& c, TrainArguments& a) {
  constexpr std::int64_t kMost = std::int64_t{1} << 53;
  c.positional(a.config_positional, "CONFIG.json",
               "configuration (DeepSpeed's JSON; libzero.model and libzero.data "
               "choose model and text); with --model it may be left out",
               false);
  c.section("Run");
  c.option("--text", a.text, "FILE", "text to train on, byte by byte (libzero.data.text, else the text of the GPL)");
  c.option("--steps", a.steps, "K",
           "optimizer steps of the whole run; 0: only evaluate, sample and export (the schedule's total_num_steps, "
           "else 100)",
           0, kMost);
  c.option("--stage", a.stage, "S", "ZeRO stage: short for --set zero_optimization.stage=S", 0, 3);
  c.choice("--device", a.device, {"cpu", "cuda"}, "where the model is: the CPU, or a GPU for each rank (cpu)");
  c.config(a.config, a.set, a.strict);
  c.section("Values that override the file and replace its \"auto\"");
  c.option("--warmup-steps", a.warmup_steps, "K", "warm-up of the schedule", 1, kMost);
  c.option("--micro-batch-size", a.micro_batch_size, "M", "samples per rank and forward", 1, kMost);
  c.option("--tensor-parallel", a.tensor_parallel, "T", "ranks that share one copy of the cut weights", 1, 65536);
  c.option("--sequence-parallel", a.sequence_parallel, "U", "ranks that share the tokens of each sample", 1, 65536);
  declare_experts(c, a.experts);
  c.option("--optimizer", a.optimizer, "TYPE", config::optimizer_names());
  c.option("--lr", a.lr, "R", "learning rate", 0, 1e6);
  c.option("--weight-decay", a.weight_decay, "R", "weight decay", 0, 1e6);
  c.choice("--dtype", a.dtype, {"fp32", "fp16", "bf16"}, "dtype of parameters and compute");
  declare_model(c, a.model);
  c.section("Results");
  c.option("--out", a.out, "DIR", "folder of the run's files (runs/<time>-stage<S>)");
  c.option("--eval-every", a.eval_every, "K", "also evaluate the held-out part every K steps", 1, kMost);
  c.option("--sample", a.sample, "N", "bytes (with --model: tokens) of text to generate at the end (200)", 0, 1000000);
  c.option("--checkpoint-dir", a.checkpoint_dir, "DIR", "save checkpoints here, at the end and when stopped");
  c.option("--save-every", a.save_every, "K", "also save every K steps", 1, kMost);
  c.option("--keep", a.keep, "N", "after a save remove all but the newest N checkpoints", 1, kMost);
  c.option("--keep-every", a.keep_every, "K", "with --keep: those of every K steps stay", 1, kMost);
  c.option("--keep-snapshot-every", a.keep_snapshot_every, "K",
           "under `zero run --restarts`: keep the states of every K steps in memory for --resume auto", 1, kMost);
  c.option("--weights-only-every", a.weights_only_every, "K",
           "every K steps save weights alone; no run can be resumed from them", 1, kMost);
  c.option("--keep-weights", a.keep_weights, "N", "with --weights-only-every: all but the newest N of these go", 1,
           kMost);
  c.flag("--save-async", a.save_async, "write checkpoints while training continues");
  c.option("--resume", a.resume, "TAG|auto", "resume from a checkpoint; auto: the newest complete one, if any");
  c.flag("--weights-only", a.weights_only,
         "with --resume: take the weights alone; optimizer, steps and the position in the text start again");
  c.repeated("--partial", a.left_out, "PATTERN",
             "with --resume or --init-from: parameters that may be missing or have another shape keep their values");
  c.option("--init-from", a.init_from, "SRC",
           "begin with weights of any kind of file or checkpoint (`zero checkpoint inspect` shows it)");
  c.option("--init-names", a.names, "MAP", "with --init-from: name map, gpt2 or a file of zero.names/1");
  c.option("--init-partial", a.partial, "PATTERN", "with --init-from: parameters that SRC may lack");
  c.repeated("--init-untie", a.untie, "NAME", "with --init-from: of tied tensors that differ, the one to take");
  c.flag("--init-optimizer", a.init_optimizer, "with --init-from: also states of the optimizer, and steps");
  c.option("--export", a.export_to, "DIR", "at the end write the weights there, for Hugging Face and others");
  c.option("--export-names", a.export_names, "MAP", "with --export: name map, gpt2 or a file of zero.names/1");
  c.option("--trace", a.trace, "FILE", "write a trace for ui.perfetto.dev (ZERO_TRACE)");
  c.option("--trace-steps", a.trace_steps, "A:B", "steps in the trace, counted from the start of this run (3:22)");
  c.no_effect("--deepspeed", false, "configurations are DeepSpeed's here in any case");
  c.option("--local-rank", a.local_rank, "N", "appended by some launchers; must equal LOCAL_RANK", 0, 65535);
}

TrainPlan plan_train(const Command& c, const TrainArguments& a) {
  if (c.given("--local-rank")) {
    const char* from_env = std::getenv("LOCAL_RANK");
    if (from_env && std::to_string(a.local_rank) != from_env)
      throw ConfigError("[--local-rank] got " + std::to_string(a.local_rank) +
                        " and environment LOCAL_RANK=" + from_env + ", expected the same rank from both");
  }
  for (const char* flag : {"--save-every", "--save-async", "--keep", "--keep-every", "--keep-snapshot-every",
                           "--weights-only-every", "--keep-weights", "--resume"})
    if (c.given(flag) && a.checkpoint_dir.empty())
      throw ConfigError(std::string("[") + flag + "] got no --checkpoint-dir, expected the folder of the checkpoints");

  for (const char* flag : {"--init-names", "--init-partial", "--init-untie", "--init-optimizer"})
    if (c.given(flag) && a.init_from.empty())
      throw ConfigError(std::string("[") + flag + "] got no --init-from, expected the weights to begin with");
  if (c.given("--export-names") && a.export_to.empty())
    throw ConfigError("[--export-names] got no --export, expected where the weights go");
  if (c.given("--steps") && a.steps == 0) require_no_steps(c, a);
  // Now, and not after the last step. Ranks that start late see what others have made; so does a restart, of an attempt
  // that failed after its export.
  std::error_code error;
  const bool exported = !a.export_to.empty() && std::filesystem::exists(a.export_to, error);
  if (exported && base::number_in_env("ZERO_RESTART_COUNT", std::numeric_limits<int>::max()) <= 0)
    throw ConfigError("[--export] " + a.export_to + " exists. Hint: remove it, or choose another name.");
  if (c.given("--weights-only") && a.resume.empty())
    throw ConfigError("[--weights-only] got no --resume, expected the checkpoint whose weights to take");
  if (c.given("--partial") && a.resume.empty() && a.init_from.empty())
    throw ConfigError("[--partial] got neither --resume nor --init-from, expected what the weights are taken from");
  if (c.given("--keep-weights") && !c.given("--weights-only-every"))
    throw ConfigError("[--keep-weights] got no --weights-only-every, expected it: nothing else saves weights alone");
  if (c.given("--keep-every") && !c.given("--keep"))
    throw ConfigError("[--keep-every] got no --keep, expected it: without it all checkpoints stay");

  TrainPlan plan;
  plan.model_plan = plan_model(c, a.model, a.steps, !a.export_to.empty());
  plan.config = config_file(a);
  if (plan.config.empty() && c.given("--warmup-steps"))
    throw ConfigError(
        "[--warmup-steps] got no CONFIG.json, expected one with a scheduler: without it the rate is constant");
  plan.options = plan.config.empty()
                     ? Options::from_json(default_model_configuration(), kDefaultConfiguration, settings_of(c, a))
                     : Options::from_file(plan.config, settings_of(c, a));
  require_experts(a.experts, plan.options);
  if (a.strict && !plan.options.notices().empty())
    throw ConfigError("[--strict] got " + std::to_string(plan.options.notices().size()) +
                      " notices, expected none; the first: " + plan.options.notices().front());
  if (!plan.options.settings().managed_gradient_accumulation)
    throw ConfigError(
        "[managed_gradient_accumulation] got false, expected true: `zero train` does not decide "
        "boundaries itself");
  if (!plan.model_plan) plan_gpt(a, plan);
  const config::Settings& s = plan.options.settings();
  plan.on_gpu = a.device == "cuda";
  plan.holdout = s.data.holdout;
  plan.eval_batches = s.data.eval_batches;
  plan.steps = c.given("--steps") ? a.steps : s.schedule.total_num_steps > 0 ? s.schedule.total_num_steps : 100;
  plan.eval_every = a.eval_every;
  plan.save_every = a.save_every;
  plan.keep = a.keep;
  plan.keep_every = a.keep_every;
  plan.weights_only_every = a.weights_only_every;
  plan.keep_weights = a.keep_weights;
  plan.load = {.weights_only = a.weights_only, .partial = a.left_out};
  plan.sample = a.sample;
  plan.checkpoint_dir = a.checkpoint_dir;
  plan.resume = a.resume;
  plan.init_from = a.init_from;
  plan.init.names = a.names;
  plan.init.optimizer = a.init_optimizer;
  plan.init.partial = a.left_out;
  if (!a.partial.empty()) plan.init.partial.push_back(a.partial);
  plan.init.untie = a.untie;
  plan.export_to = a.export_to;
  plan.is_exported = exported;
  plan.exported.names = a.export_names;
  if (a.export_names == "gpt2" && !plan.model_plan) plan.exported.heads = plan.model.heads;
  plan.out = a.out;
  plan_trace(c, a, plan);
  return plan;
}

}  // namespace zero::cli
