// Which parameters a micro-batch reads, operator by operator. This suffices for the transfers of a step; model_pass.h
// also has the model's allocations.
#pragma once
#include <vector>

#include <zero/plan.h>

#include "plan/pass_sink.h"
#include "plan/units.h"

namespace zero::planning {

// Indices of the parameters that each operator reads; backward includes recomputation.
struct Pass {
  std::vector<std::vector<std::size_t>> forward, backward;
};
// From the model's description, else unit by unit. `parameters`: parameters_of(model). segments: number of
// checkpointed segments; 0: none.
Pass pass_of(const PlanModel& model, const std::vector<Parameter>& parameters, std::int64_t segments);

void run_forward(const Pass& pass, PassSink& sink);
// A unit's gradients arrive after its last use, in the order of reductions. Those of root units, which are read at
// both ends of the model, arrive last. width: bytes per element of a gradient.
void run_backward(const Pass& pass, const std::vector<Unit>& units, int width, PassSink& sink);

}  // namespace zero::planning
