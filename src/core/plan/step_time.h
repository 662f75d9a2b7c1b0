// Predicts the time of a step from a profile of the machine and the work and traffic of the step: the sum of parts that
// cannot overlap, and the longest of those that do. dry_run.h counts the bytes.
#pragma once
#include <zero/plan.h>

#include "config/settings.h"
#include "plan/mesh_parts.h"

namespace zero::planning {

struct StepInput {
  const PlanModel& model;
  const config::Settings& settings;
  std::int64_t micro = 1, accumulation = 1, segments = 0;
  Share share{};  // of the model, on one rank
};

// FLOP: 2 per matrix parameter and token, twice that in backward, plus attention scores. Elements: what the operators
// of a layer other than matrix products write, plus logits. With segments all layers run forward once more.
void count_passes(const StepInput& input, PlanWork& work);

PlanTime time_of(const config::Settings& settings, const PlanMachine& machine, const PlanTraffic& traffic,
                 const PlanWork& work);

}  // namespace zero::planning
