// `zero train`: what its command line and configuration ask for, as plain values. Reading them is
// train_options.cpp, training is train_run.cpp, what is written about it train_report.cpp; the library
// knows nothing of models, text or run folders.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <zero/options.h>
#include <zero/trace.h>

#include "cli/support/options.h"
#include "models/gpt.h"

namespace zero::cli {

// As given; 0 or empty: not given.
struct TrainArguments {
  std::string config_positional, config;
  std::vector<std::pair<std::string, std::string>> set;
  bool strict = false;
  std::int64_t stage = 0, steps = 0, warmup_steps = 0, micro_batch_size = 0, save_every = 0, sample = 200,
               local_rank = 0;
  double lr = 0, weight_decay = 0;
  std::string optimizer, dtype, device = "cpu", text, checkpoint_dir, resume, out, trace, trace_steps;
};

// A run with every source of settings joined.
struct TrainPlan {
  Options options;
  models::GptConfig model;
  std::int64_t segments = 0;    // runs of layers that are checkpointed; 0: none
  bool on_gpu = false;          // the rank's GPU; else the CPU
  std::int64_t steps = 0;       // optimizer steps of the whole run, resumed ones included
  std::int64_t save_every = 0;  // steps; 0: only at the end
  std::int64_t sample = 0;      // bytes of text that the trained model writes
  std::string config, text, checkpoint_dir, resume, out;
  std::vector<std::string> command;  // the words after "zero"
  double holdout = 0;
  std::int64_t eval_batches = 0;  // forwards a rank, 0: the whole held-out part
  std::string trace;              // empty: none
  TraceSteps trace_steps = TraceSteps::after_warmup();
};

void declare_train(Command& command, TrainArguments& arguments);
// Throws ConfigError (IoError for a configuration that cannot be read).
TrainPlan plan_train(const Command& command, const TrainArguments& arguments);

}  // namespace zero::cli
