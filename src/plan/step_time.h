// How long a step takes by a profile of the machine, from what is computed and what moves: a sum of what cannot overlap
// and the longest of what does. Bytes are counted elsewhere (rank_memory.h); nothing here knows units or pools.
#pragma once
#include <zero/plan.h>

#include "config/settings.h"

namespace zero::planning {

struct StepInput {
  const PlanModel& model;
  const config::Settings& settings;
  std::int64_t micro = 1, accumulation = 1, segments = 0;
  const PlanMachine& machine;
  PlanTraffic traffic;
  std::int64_t collectives = 0;      // calls of a step
  std::int64_t updated = 0, updated_on_host = 0;  // elements that this rank updates, those offloaded apart
};

// FLOP of one rank's forward and backward in a step: 2 for each parameter of a matrix and token, twice that backward,
// attention's scores beside, and one more forward with segments.
double flops_of(const StepInput& input);

PlanTime time_of(const StepInput& input);

}  // namespace zero::planning
