// Which parameters a micro-batch reads, operator by operator: enough for what moves in a step, without what a model
// allocates (that is model_pass.h).
#pragma once
#include <vector>

#include "plan/pass_sink.h"
#include "plan/units.h"

namespace zero::planning {

// Indices of parameters; backward holds recomputation.
struct Pass {
  std::vector<std::vector<std::size_t>> forward, backward;
};
// Of the GPT of models/gpt.h, by the names of its parameters. segments: checkpointed runs of layers; 0: none.
// Throws ConfigError for other names.
Pass gpt_pass(const std::vector<Parameter>& parameters, std::int64_t segments);
// Unit by unit, for models whose operators are not known.
Pass pass_by_units(const std::vector<Parameter>& parameters);

void run_forward(const Pass& pass, PassSink& sink);
// A unit's gradients arrive after its last use, in the order of reductions; roots', which are read at both ends, last.
// width: bytes of a gradient's element.
void run_backward(const Pass& pass, const std::vector<Unit>& units, int width, PassSink& sink);

}  // namespace zero::planning
