// How long a step takes by a profile of the machine, from what is computed and what moves: a sum of what cannot overlap
// and the longest of what does. Bytes are counted elsewhere (dry_run.h); nothing here knows units or pools.
#pragma once
#include <zero/plan.h>

#include "config/settings.h"

namespace zero::planning {

struct StepInput {
  const PlanModel& model;
  const config::Settings& settings;
  std::int64_t micro = 1, accumulation = 1, segments = 0;
};

// FLOP: 2 for each parameter of a matrix and token, twice that backward, attention's scores beside. Elements: what a
// layer's operators beside the products write, and logits. With segments all layers run forward once more.
void count_passes(const StepInput& input, PlanWork& work);

PlanTime time_of(const config::Settings& settings, const PlanMachine& machine, const PlanTraffic& traffic,
                 const PlanWork& work);

}  // namespace zero::planning
