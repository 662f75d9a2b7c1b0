// Divides parameters into units by their sizes and modules. Arithmetic only, no tensors. Gives the engine
// (engine/units.h) and the planner (plan/units.h) the same units.
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
  int axis = 0;        // the ranks over which it is sharded; experts have their own
  bool fp32 = false;   // it stays fp32 (kept_fp32.h)
  std::string kind{};  // of its update, if that has other optimizer states than most; its unit is named so
};

struct Unit {
  std::string name;  // path, or "root"
  bool root = false, trainable = true;
  bool persistent = false;              // its parameters are never sharded
  bool fp32 = false;                    // they stay fp32
  std::vector<std::size_t> parameters;  // indices into the members
  int axis = 0;
  // The same number for units of one module that differ in what they are, such as frozen and trained ones, which
  // operators read in turn; -1: of the root, and where a module is split by size.
  int module = -1;
};

// Units in order of registration, the root first. A unit's frozen parameters form a separate unit, because they have no
// gradients and optimizer states, and so do those that stay fp32, because a flat vector has one dtype, and those of
// each kind, because a flat vector has one number of optimizer states. Adjacent units of fewer than min_numel elements
// are merged. Units of more than max_numel elements are split between parameters ("name", "name/2", ...); a larger
// parameter forms its own unit. Parameters of at most persistent_numel elements, in order of registration until their
// sum would exceed persistent_total, form the last unit, "persistent". A unit has members of one axis; paths of other
// axes than 0 are those of no other member, and their small parameters are sharded too.
struct UnitRules {
  std::int64_t min_numel = 0, max_numel = std::numeric_limits<std::int64_t>::max();
  std::int64_t persistent_numel = 0, persistent_total = 0;
};
std::vector<Unit> cut_units(const std::vector<UnitMember>& members, const UnitRules& rules);

}  // namespace zero::sharding
