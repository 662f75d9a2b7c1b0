// A model in numbers, and the units an Engine would cut it into: names, elements, padding, shards. The cut is
// memory/unit_cut.h and the padding memory/shard_layout.h, the same code that the engine runs; here is only what stands
// for a walk over modules. Bytes are rank_memory.h's and schedule.h's; nothing here knows a dtype but by its width.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "config/settings.h"
#include "memory/shard_layout.h"
#include "memory/unit_cut.h"

namespace zero::planning {

// One parameter as named_parameters() would show it.
struct Parameter {
  std::string name;
  std::int64_t numel = 0;
  std::string unit;  // path of the module that is its unit; empty: the root
  bool trainable = true;
};

struct Unit {
  std::string name;  // as in traces and messages of the engine: "root", "blocks.0", ...
  bool root = false, trainable = true;
  bool persistent = false;              // whole on every rank at stage 3, too
  std::vector<std::size_t> parameters;  // indices into what was given
  memory::ShardLayout layout;           // numel(), padded_numel(), shard_numel(), offsets
  std::int64_t numel() const { return layout.numel(); }
  std::int64_t padded_numel() const { return layout.padded_numel(); }
  std::int64_t shard_numel() const { return layout.shard_numel(); }
};

// In the engine's order: the root first, then as registered. width: bytes of an element of the compute dtype.
// Throws ConfigError when there is no parameter or libzero.units names a module without parameters.
std::vector<Unit> cut_into_units(const std::vector<Parameter>& parameters, const config::Settings& settings, int world,
                                 std::int64_t width, bool gpu);

// In which gradients are reduced: trainable units from the last to the first, roots behind them.
std::vector<std::size_t> reduce_order(const std::vector<Unit>& units);

}  // namespace zero::planning
