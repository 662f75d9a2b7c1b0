// The memory behaviour of a model's forward and backward: which operator reads which parameters, what it allocates,
// what is saved for backward and when autograd releases it. It comes from the model's own description, operator by
// operator (PlanModel::pass), or else from a rule, layer by layer. Nothing is computed.
#pragma once
#include <cstdint>
#include <vector>

#include <zero/plan.h>

#include "plan/mesh_parts.h"
#include "plan/pass_sink.h"
#include "plan/units.h"

namespace zero::planning {

// Number of checkpointed segments, as `zero train` reads it from the configuration; 0: none.
std::int64_t segments_of(const Options& options, std::int64_t layers);
// The tier that keeps their inputs until backward.
Tier checkpoint_tier(const config::ActivationSettings& activations);

struct MicroBatch {
  std::int64_t samples = 1;
  std::int64_t segments = 0;
  Tier inputs = Tier::Device;  // tier of the segments' inputs until backward
  int element = 4;             // bytes of an activation
  Share share{};               // of the model, on this rank
  int input_parts = 1;         // that the segments' inputs are divided into (partition_activations)
  std::vector<bool> fp32{};    // of each parameter: it stays fp32; empty: none does
};
// Simulates one forward and backward. `parameters`: parameters_of(model).
void run_micro_batch(const PlanModel& model, const std::vector<Parameter>& parameters, const MicroBatch& batch,
                     PassSink& memory);

}  // namespace zero::planning
