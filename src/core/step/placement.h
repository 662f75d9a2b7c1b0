// Where the states of every unit rest: as the configuration's offload blocks say and, for what they leave open, so that
// every tier keeps to its budget. Optimizer states leave a tier first, since they travel once a step, then parameters,
// which travel for every use; the last units first. What a placement needs is step/budget.h's.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "step/budget.h"

namespace zero::step {

// The block `memory` of a configuration, in bytes.
struct Budgets {
  std::optional<std::int64_t> device, host;  // unset: no limit
  std::optional<std::int64_t> file;          // unset: nothing moves to a file
  std::int64_t activations = 0;              // of the device's, left free for them

  static Budgets of(const config::MemoryBudget& memory);
  bool any() const { return device || host || file; }
  const std::optional<std::int64_t>& of(Tier tier) const {
    return tier == Tier::Device ? device : tier == Tier::Host ? host : file;
  }
};

// Bytes that a tier needs in all; of the device, with the activations' share.
std::int64_t needed(const Need& need, Tier tier, const Budgets& budgets);

// What budgets may move: what no other key of the configuration places.
struct PlacementFreedom {
  bool optimizer = false, params = false;
  bool together = false;  // optimizer states leave the device all or none
};

// `is_set(path)`: the configuration has the key (config::Document::is_set).
template <class IsSet>
PlacementFreedom placement_freedom(const ShardingPolicy& sharding, bool gpu, const IsSet& is_set) {
  return {.optimizer = sharding.optimizer && !is_set("zero_optimization.offload_optimizer.device"),
          .params = sharding.params && !is_set("zero_optimization.offload_param.device"),
          .together = gpu};
}

// What is to be placed. Everything outlives it.
struct PlacementTask {
  const RunFacts& run;
  const config::Settings& settings;
  const std::vector<Unit>& units;
  PlacementFreedom freedom;
};

struct PlacementPlan {
  std::vector<Placement> placements;  // one a unit
  std::optional<Need> need;           // unset: there are no budgets
  bool fits = true;
};

// Walks the program some ten times where there are budgets and something has to move; all ranks find the same.
PlacementPlan place(const PlacementTask& task);

// The smallest budget of a tier that works while the others stay; unset: none does. Some hundred walks.
std::optional<std::int64_t> smallest_budget(const PlacementTask& task, Tier tier);

// What a plan that does not fit lacks, and the smallest budgets that would do; `who` ("rank 0/2") may be empty.
std::string refusal(const PlacementTask& task, const PlacementPlan& plan, const std::string& who);

// For people, several lines: each tier's bytes by purpose beside its budget, and which units moved.
std::string describe(const PlacementTask& task, const PlacementPlan& plan);

}  // namespace zero::step
