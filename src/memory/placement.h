// Which states rest where so that every tier keeps to its budget: optimizer states leave the device first, since they
// travel once a step, then parameters, which travel for every use; from host memory to a file likewise. Pure
// arithmetic; what a place costs is footprint()'s.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "memory/footprint.h"

namespace zero::memory {

struct Budgets {
  std::optional<std::int64_t> device, host;  // unset: no limit
  std::optional<std::int64_t> file;          // unset: nothing moves to a file
  std::int64_t activations = 0;              // of the device's, left free
  const std::optional<std::int64_t>& of(Tier tier) const {
    return tier == Tier::Device ? device : tier == Tier::Host ? host : file;
  }
};

// What may move: where something else decided, the given place stays.
struct Movable {
  bool optimizer = false, parameters = false;
  bool together = false;  // optimizer states leave the device all or none
};

struct Placement {
  std::vector<GroupPlace> places;
  Footprint need;
  bool fits = false;
  // Where it does not fit: the smallest budget of each tier with which it would, the others staying; unset: none helps.
  std::optional<std::int64_t> smallest[MemoryReport::kTiers];
};

// For people, several lines: each tier's bytes by purpose beside its budget, and which groups moved. `names`: of
// groups.
std::string describe(const Placement& placement, const Budgets& budgets, const std::vector<GroupSize>& groups,
                     const std::vector<std::string>& names);

// `places`: where states rest if there is room.
Placement place(const FootprintRules& rules, const std::vector<GroupSize>& groups, std::vector<GroupPlace> places,
                const Movable& movable, const Budgets& budgets);

}  // namespace zero::memory
