// Which parameters are communicated together, by their sizes and the modules they belong to: pure arithmetic, no
// tensors. Whoever walks a model (engine/units.h) or describes one in numbers (plan/units.h) gets the same units.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace zero::sharding {

struct UnitMember {
  std::int64_t numel = 0;
  std::string unit;  // path of its unit; empty: the root
  bool trainable = true;
};

struct Unit {
  std::string name;  // path, or "root"
  bool root = false, trainable = true;
  bool persistent = false;              // never released
  std::vector<std::size_t> parameters;  // indices into the members
};

// Units in order of registration, the root first; the frozen parameters of a unit are a unit of
// their own, since they have neither gradients nor optimizer states. Neighbours of fewer than
// min_numel elements are merged; what then has more than max_numel is cut between parameters ("name", "name/2", ...), a
// larger parameter being one by itself. Parameters of at most `persistent_numel` elements, in order of registration
// until their sum would exceed `persistent_total`, are the last unit, "persistent".
struct UnitRules {
  std::int64_t min_numel = 0, max_numel = std::numeric_limits<std::int64_t>::max();
  std::int64_t persistent_numel = 0, persistent_total = 0;
};
std::vector<Unit> cut_units(const std::vector<UnitMember>& members, const UnitRules& rules);

}  // namespace zero::sharding
