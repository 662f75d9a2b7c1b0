// The command line and configuration of `zero train` as plain values. train_options.cpp reads them, train_run.cpp
// trains, train_report.cpp writes output. The library is independent of models, text and run folders.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <zero/engine_types.h>
#include <zero/options.h>
#include <zero/trace.h>
#include <zero/weights.h>

#include "apps/finetune/model_plan.h"
#include "models/gpt.h"
#include "tools/support/expert_options.h"
#include "tools/support/options.h"

// argv[0] is the command's name. Returns the exit code of the process, and may throw the four errors.
int zero_train(int argc, char** argv);

namespace zero::cli {

// As given on the command line; 0 or empty: not given.
struct TrainArguments {
  std::string config_positional, config;
  std::vector<std::pair<std::string, std::string>> set;
  bool strict = false, save_async = false, init_optimizer = false, weights_only = false;
  std::int64_t tensor_parallel = 1, sequence_parallel = 1;
  ExpertArguments experts;
  std::int64_t stage = 0, steps = 0, eval_every = 0, warmup_steps = 0, micro_batch_size = 0, save_every = 0, keep = 0,
               keep_every = 0, keep_snapshot_every = 0, weights_only_every = 0, keep_weights = 0, sample = 200,
               local_rank = 0;
  std::vector<std::string> left_out;
  double lr = 0, weight_decay = 0;
  std::string optimizer, dtype, device = "cpu", text, checkpoint_dir, resume, init_from, names, partial, out, trace,
                                trace_steps;
  std::vector<std::string> untie;
  std::string export_to, export_names;
  ModelArguments model;
};

// A run with all sources of settings combined.
struct TrainPlan {
  Options options;
  models::GptConfig model;              // the built-in GPT
  std::optional<ModelPlan> model_plan;  // in place of it
  std::int64_t segments = 0;            // checkpointed groups of layers; 0: none
  bool on_gpu = false;                  // the rank's GPU; else the CPU
  std::int64_t steps = 0;               // optimizer steps of the whole run, including those before a resume; 0: no
                                        // training, only an evaluation, samples and an export
  std::int64_t eval_every = 0;          // interval of evaluations in steps; 0: only at the end
  std::int64_t save_every = 0;          // interval in steps; 0: only at the end
  std::int64_t keep = 0;                // newest checkpoints; 0: all
  std::int64_t keep_every = 0;          // and those of every K steps; 0: none
  std::int64_t weights_only_every = 0;  // interval of saves of weights alone; 0: none
  std::int64_t keep_weights = 0;        // newest of these; 0: all
  LoadOptions load;                     // of --resume
  std::vector<std::string> added;       // patterns of parameters that a base model does not have
  std::int64_t sample = 0;              // bytes of text to generate with the trained model
  std::string config, text, checkpoint_dir, resume, out;
  std::string init_from;  // weights that a run which is not resumed begins with; empty: those of the seed
  ImportOptions init;
  std::string export_to;     // where weights for other libraries go at the end; empty: nowhere
  bool is_exported = false;  // by an earlier attempt, which a restart continues from
  ExportOptions exported;
  std::vector<std::string> command;  // the words after "zero"
  double holdout = 0;
  std::int64_t eval_batches = 0;  // forwards per rank; 0: the whole held-out part
  std::string trace;              // empty: none
  TraceSteps trace_steps = TraceSteps::after_warmup();
};

void declare_train(Command& command, TrainArguments& arguments);
// Throws ConfigError, and IoError if a configuration cannot be read.
TrainPlan plan_train(const Command& command, const TrainArguments& arguments);

}  // namespace zero::cli
