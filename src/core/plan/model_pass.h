// Forward and backward of a model as what they do to memory: which operator reads which parameters, what it allocates,
// what is saved for backward and when autograd lets go of it. A model that describes itself says so operator by
// operator (PlanModel::pass); of others it is a rule, layer by layer. Nothing is computed here.
#pragma once
#include <cstdint>
#include <vector>

#include <zero/plan.h>

#include "plan/pass_sink.h"
#include "plan/units.h"

namespace zero::planning {

// Segments that run again in backward, as `zero train` reads them from the configuration: 0 none.
std::int64_t segments_of(const Options& options, std::int64_t layers);
// Where their inputs wait.
Tier checkpoint_tier(const config::ActivationSettings& activations);

struct MicroBatch {
  std::int64_t samples = 1;
  std::int64_t segments = 0;
  Tier inputs = Tier::Device;  // of segments, while they wait
  int element = 4;             // bytes of an activation
};
// One forward and backward. `parameters` as parameters_of().
void run_micro_batch(const PlanModel& model, const std::vector<Parameter>& parameters, const MicroBatch& batch,
                     PassSink& memory);

}  // namespace zero::planning
