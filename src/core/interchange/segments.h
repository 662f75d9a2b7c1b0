// Tensors that consist of other tensors' elements in another order: transposed, joined along the first dimension, with
// heads permuted. Enumerates which elements go where; moves none. No files.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace zero::interchange {

// How a segment's elements follow each other in the source.
enum class Order {
  Same,
  Transposed,     // the source is [cols, rows]
  PairsToHalves,  // rows of each head: the source has (0, d/2), (1, d/2 + 1), ... side by side, the target its halves
  HalvesToPairs,  // the inverse
};
Order inverse(Order order);

// Rows of a target: elements [begin, begin + rows * cols) of a source.
struct Segment {
  std::size_t source = 0;
  std::int64_t begin = 0, rows = 0, cols = 0;
  Order order = Order::Same;
  std::int64_t heads = 0;  // of the two permutations
  std::int64_t numel() const { return rows * cols; }
};

// A tensor made of segments, one after another.
struct MappedTensor {
  std::string kind, name, dtype;
  std::vector<std::int64_t> shape;
  std::vector<Segment> segments;
  bool moves_elements() const;  // whether any order is not Same
};

// Elements that follow each other in a source and have equal distances in the target.
struct ElementRun {
  std::size_t source;
  std::int64_t from, numel;  // in the source
  std::int64_t to, stride;   // in the target: of the first, and from one to the next
};
// All runs of elements [begin, end) of the target.
void for_each_run(const MappedTensor& tensor, std::int64_t begin, std::int64_t end,
                  const std::function<void(const ElementRun&)>& take);

// Copies elements of `width` bytes from a dense range to places with a stride, in elements.
void scatter(const void* from, std::int64_t numel, int width, void* to, std::int64_t stride);

}  // namespace zero::interchange
