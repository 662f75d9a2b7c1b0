// A model in numbers, and the units an Engine would cut it into: names, elements, padding, shards. The cut is
// sharding/unit_cut.h and the padding sharding/shard_layout.h, the same code that the engine runs; here is only what
// stands for a walk over modules. Nothing here knows a dtype but by its width.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "config/settings.h"
#include "step/facts.h"

namespace zero::planning {

// One parameter as named_parameters() would show it.
struct Parameter {
  std::string name;
  std::int64_t numel = 0;
  std::string unit;  // path of the module that is its unit; empty: the root
  bool trainable = true;
};

using step::Unit;  // its parameters: indices into what was given

// In the engine's order: the root first, then as registered. width: bytes of an element of the compute dtype.
// Throws ConfigError when there is no parameter or libzero.units names a module without parameters.
std::vector<Unit> cut_into_units(const std::vector<Parameter>& parameters, const config::Settings& settings, int world,
                                 std::int64_t width, bool gpu);

using step::reduce_order;

}  // namespace zero::planning
