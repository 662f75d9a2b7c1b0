// Which parameters a micro-batch reads, operator by operator: enough for what moves in a step, without what a model
// allocates (that is model_pass.h).
#pragma once
#include <vector>

#include <zero/plan.h>

#include "plan/pass_sink.h"
#include "plan/units.h"

namespace zero::planning {

// Indices of parameters; backward holds recomputation.
struct Pass {
  std::vector<std::vector<std::size_t>> forward, backward;
};
// By the model's description, else unit by unit. `parameters` as parameters_of(); segments: checkpointed runs of
// layers, 0: none.
Pass pass_of(const PlanModel& model, const std::vector<Parameter>& parameters, std::int64_t segments);

void run_forward(const Pass& pass, PassSink& sink);
// A unit's gradients arrive after its last use, in the order of reductions; roots', which are read at both ends, last.
// width: bytes of a gradient's element.
void run_backward(const Pass& pass, const std::vector<Unit>& units, int width, PassSink& sink);

}  // namespace zero::planning
