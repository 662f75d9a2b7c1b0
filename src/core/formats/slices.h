// Orders of a tensor's elements. Checkpoints number those of a tensor that tensor-parallel ranks cut slice by slice
// and, in a slice, box by box (manifest.h). Two cuts of one tensor number its elements differently.
#pragma once
#include <cstdint>
#include <vector>

#include "formats/manifest.h"

namespace zero::formats {

// Elements that follow each other in both orders.
struct Run {
  std::int64_t wanted = 0, stored = 0, numel = 0;
};

// The runs that have the elements [begin, end) of the order `wanted`, by their place in the order `stored`. Slices: of
// tensors of this shape, empty: not cut.
std::vector<Run> runs_between(const std::vector<std::int64_t>& shape, const std::vector<std::vector<Box>>& wanted,
                              const std::vector<std::vector<Box>>& stored, std::int64_t begin, std::int64_t end);

}  // namespace zero::formats
