// A model's parameters by size, and the units an Engine would cut them into: names, elements, padding, shards. The cut
// (sharding/unit_cut.h) and the padding (sharding/shard_layout.h) are the engine's code; only the walk over modules is
// replaced. Dtypes are represented by their width.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "config/settings.h"
#include "sharding/cut_plan.h"
#include "step/facts.h"

namespace zero::planning {

// One parameter as named_parameters() would list it.
struct Parameter {
  std::string name;
  std::int64_t numel = 0;  // that one rank holds before ZeRO shards it
  std::string unit;        // path of the module that is its unit; empty: the root
  bool trainable = true;
  std::vector<std::int64_t> sizes{};  // of the same elements; {}: one dimension
  int parts = 1;                      // tensor-parallel ranks that it is divided over ...
  std::int64_t whole = 0;             // ... and the elements of all parts, if there is more than one
  sharding::ParameterCut cut{};       // how
  std::int64_t expert = -1;           // number of the expert that it belongs to; -1: none
  int ep_size = 1;                    // above 1: its expert is on every ep_size-th rank, over which it is sharded
  std::string layer{};                // path of its layer, if that is not its unit
  bool table = false;                 // the weight of an embedding
};

// The path of a parameter's layer; empty: it is in none.
inline const std::string& layer_of(const Parameter& parameter) {
  return parameter.layer.empty() ? parameter.unit : parameter.layer;
}

using step::Unit;  // parameters are indices into the vector passed to cut_into_units()

// In the engine's order: the root first, then in the order of registration. world: the ranks that ZeRO shards over.
// width: bytes per element of the param dtype, of parameters that do not stay fp32. Throws ConfigError if there is no
// parameter or libzero.units names a module without parameters.
std::vector<Unit> cut_into_units(const std::vector<Parameter>& parameters, const config::Settings& settings, int world,
                                 std::int64_t width, bool gpu);

// Whether each of `count` parameters stays fp32.
std::vector<bool> fp32_parameters(const std::vector<Unit>& units, std::size_t count);
// The patterns of libzero.keep_fp32 that match no parameter, one text each, with names that may have been meant.
std::vector<std::string> unmatched_patterns(const std::vector<Parameter>& parameters, const config::Settings& settings);
// Whether all layers of one structure keep the same of their parameters in fp32.
bool keeps_the_same(const std::vector<Parameter>& parameters, const config::Settings& settings);

using step::reduce_order;

}  // namespace zero::planning
