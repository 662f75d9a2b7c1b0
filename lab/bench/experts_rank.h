// One rank of `zero bench experts`: trains layers of experts at one stage, recipe and expert-parallel degree, and times
// the parts of its steps. experts.cpp selects configurations and prints results.
#pragma once
#include <zero/communicator.h>

#include <cstdint>
#include <memory>
#include <string>

#include "tools/support/measurement.h"

namespace zero::cli {

struct ExpertsTask {
  std::string recipe = "fp32";  // "fp32", "bf16"
  std::int64_t stage = 1, ep = 1;
  std::int64_t steps = 20, warmup = 5, threads = 1;
  std::int64_t layers = 2, hidden = 256, inner = 1024, experts = 8, top_k = 1, tokens = 1024;
  double capacity_factor = 1, skew = 0;
  bool drop = true, merged = false;

  Json json() const;
  static ExpertsTask from(const Json& json);
};

// Collective. x = x + MoE(LayerNorm(x)) for each layer, x [tokens, hidden] of every rank; an expert is Linear(hidden,
// inner), GELU, Linear(inner, hidden), or without `inner` the identity. The loss is the mean square of x, plus 0.01
// times the layers' auxiliary losses. AdamW, clipping at 1. skew: feature 0 of all tokens is 4, and it weighs so much
// in the gate's logit of expert 0. Times are rank 0's, in seconds, one a measured step:
//   {"transport", "step_s", "forward_s", "backward_s", "optimizer_s", "floor_s": [...], "losses": [...],
//    "peak_pss_bytes": [by rank], "bytes_sent_per_step", "exchanged_bytes_per_step", "formula_bytes_per_step",
//    "dropped", "load"}
// floor_s: what no implementation can leave out, on all ranks at once: forward and backward of a rank's experts on the
// rows that were kept, in equal batches, and a fused AdamW step over 1/N of the experts' parameters in fp32.
// Bytes are sums over all ranks: what all-to-alls sent, and what the rows that cross ranks and the counts take by
// formula. dropped: share of the choices; load: the most chosen expert's tokens over the mean, the mean of all layers.
Json measure_experts(const ExpertsTask& task, const std::shared_ptr<Communicator>& comm);

}  // namespace zero::cli
