// One rank of `zero bench step`: trains the GPT at one stage and recipe, or runs only forward and backward of the plain
// module concurrently with the other ranks, and times the parts of its steps. step.cpp selects configurations and
// prints results.
#pragma once
#include <zero/communicator.h>
#include <zero/options.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "models/gpt.h"
#include "tools/support/measurement.h"

namespace zero::cli {

struct StepTask {
  std::string recipe = "fp32";  // "fp32", "bf16", "fp16"
  bool on_gpu = false;
  int stage = 0;  // kCompute: the plain module without communication
  static constexpr int kCompute = -1;
  std::int64_t steps = 20, warmup = 5, batch = 1, threads = 1;
  std::int64_t tensor_parallel = 0, sequence_parallel = 0;  // 0: as the configuration says, by default 1
  // Ranks of the run of which this is one without the others (zero/fake_communicator.h); 0: all are there.
  std::int64_t alone_of = 0;
  std::int64_t segments = 0;  // of activation checkpointing; 0: as the configuration says, by default none
  models::GptConfig gpt;
  std::string
      llama;  // a Llama by its name, in the GPT's place: gpt.sequence and gpt.vocabulary are its; empty: the GPT
  std::vector<std::string> set;  // "KEY=VALUE" settings of the configuration
  std::string trace;             // file for a trace of additional steps; empty: none

  Json json() const;
  static StepTask from(const Json& json);
};

// The configuration of a task: AdamW with lr 3e-4, betas 0.9 and 0.95, eps 1e-8, weight decay 0.1. The GPT is cut
// between heads. Throws ConfigError.
Options options_of(const StepTask& task);

// Collective. Times are rank 0's, in seconds, one a measured step:
//   {"transport", "step_s", "forward_s", "backward_s", "optimizer_s": [...], "losses": [...],
//    "bytes_sent_per_step", "peak_pss_bytes": [by rank], "alone": {"device_peak_bytes" of the ledger, "cpu_step_s",
//    "cpu_optimizer_s": processor time} for a rank without the others, "memory": {...} on a GPU, "trace": {...},
//    "trace_lines":
//    [...]}
// and if ranks share samples {"bytes_by_axis", "operations"}: bytes sent a step by dimension of the mesh, and by
// operation with calls. Those of activations have "alone_s", what a step's calls take when nothing else runs: as many
// calls, each of the mean size, one after another.
// For kCompute {"step_s", "forward_s", "backward_s", "adamw_s", "elements"}: forward and backward, and a fused AdamW
// step over 1/N of the parameters' number in fp32, N the ranks that ZeRO shards over. If ranks share samples, this is
// the share of one rank: the plain module with its parts of the cut weights, on its tokens, with attention of its heads
// over all tokens; what every rank computes (norms, residuals, embeddings of positions) is whole. elements: of the
// parameters that this rank has. PSS is that of three more steps, not timed, less what the rank held before it built
// the model. Complete on rank 0 only.
Json measure_step(const StepTask& task, const std::shared_ptr<Communicator>& comm);

}  // namespace zero::cli
