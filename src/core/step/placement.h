// The tiers of every unit's states: given by the configuration's offload blocks, otherwise chosen so that every tier is
// within its budget. Optimizer states leave a tier first, because they are transferred once per step; then parameters,
// which are transferred for every use; last units first. step/budget.h computes what a placement needs.
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
  std::int64_t activations = 0;              // of the device's budget, reserved for activations

  static Budgets of(const config::MemoryBudget& memory);
  bool any() const { return device || host || file; }
  const std::optional<std::int64_t>& of(Tier tier) const {
    return tier == Tier::Device ? device : tier == Tier::Host ? host : file;
  }
};

// Total bytes that a tier needs; on the device, including those reserved for activations.
std::int64_t needed(const Need& need, Tier tier, const Budgets& budgets);

// The states that budgets may move: those that no other key of the configuration places.
struct PlacementFreedom {
  bool optimizer = false, params = false;
  bool together = false;  // optimizer states leave the device all or none
};

// is_set(path): whether the configuration has the key (config::Document::is_set).
template <class IsSet>
PlacementFreedom placement_freedom(const ShardingPolicy& sharding, bool gpu, const IsSet& is_set) {
  return {.optimizer = sharding.optimizer && !is_set("zero_optimization.offload_optimizer.device"),
          .params = sharding.params && !is_set("zero_optimization.offload_param.device"),
          .together = gpu};
}

// The input of a placement. Everything must outlive it.
struct PlacementTask {
  const RunFacts& run;
  const config::Settings& settings;
  const std::vector<Unit>& units;
  PlacementFreedom freedom;
};

struct PlacementPlan {
  std::vector<Placement> placements;  // one per unit
  std::optional<Need> need;           // unset: there are no budgets
  bool fits = true;
};

// Runs the program about ten times if there are budgets and something must move. Deterministic: the same on all ranks.
PlacementPlan place(const PlacementTask& task);

// The smallest feasible budget of a tier with the others unchanged; unset: none is feasible. About a hundred runs.
std::optional<std::int64_t> smallest_budget(const PlacementTask& task, Tier tier);

// The error for a plan that does not fit: missing bytes and the smallest feasible budgets. `who` ("rank 0/2") may be
// empty.
std::string refusal(const PlacementTask& task, const PlacementPlan& plan, const std::string& who);

// A description in several lines: each tier's bytes by purpose and its budget, and the units that were moved.
std::string describe(const PlacementTask& task, const PlacementPlan& plan);

}  // namespace zero::step
