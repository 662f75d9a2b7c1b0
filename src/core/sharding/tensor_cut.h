// How tensor parallelism divides one tensor over the ranks of an axis. Arithmetic only, no tensors.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace zero::sharding {

struct Range {
  std::int64_t begin = 0, end = 0;
  std::int64_t numel() const { return end - begin; }
};

// Part `part` of `parts` of n elements, divided at multiples of `multiple`: with c = n / multiple,
// [floor(part * c / parts) * multiple, floor((part + 1) * c / parts) * multiple). `parts` need not divide c.
Range cut_range(std::int64_t n, std::int64_t multiple, int part, int parts);

struct TensorCut {
  std::vector<std::int64_t> sizes;        // of the whole tensor
  int dim = 0;                            // that is divided
  std::vector<std::int64_t> pieces = {};  // lengths along `dim` that are divided separately (q, k, v of a fused weight)
  std::int64_t multiple = 1;              // of elements along `dim`, at which pieces are divided
  int parts = 1;

  // Empty, or why the tensor cannot be divided like this.
  std::string fault() const;
  // Along `dim`, of each piece: the range of the whole tensor that a part holds. A part holds them one after another.
  std::vector<Range> ranges(int part) const;
  std::vector<std::int64_t> part_sizes(int part) const;
  std::int64_t numel() const;
  std::int64_t part_numel(int part) const;

  // Consecutive elements of a part and of the whole tensor, both row-major and flat.
  struct Run {
    std::int64_t part_begin, whole_begin, numel;
  };
  // The runs of elements [begin, end) of a part, in order.
  std::vector<Run> runs(int part, std::int64_t begin, std::int64_t end) const;
};

}  // namespace zero::sharding
