// See slices.h.
#include "formats/slices.h"

#include <algorithm>

namespace zero::formats {
namespace {

using Sizes = std::vector<std::int64_t>;

struct Placed {
  Box box;
  std::int64_t begin = 0;  // of its first element in the order
  std::int64_t numel() const { return numel_of(box.size); }
  // The place of an element of the tensor that is in the box.
  std::int64_t at(const Sizes& index) const {
    std::int64_t place = 0;
    for (std::size_t d = 0; d < index.size(); ++d) place = place * box.size[d] + (index[d] - box.start[d]);
    return begin + place;
  }
};

std::vector<Placed> placed(const Sizes& shape, const std::vector<std::vector<Box>>& slices) {
  std::vector<Placed> boxes;
  std::int64_t begin = 0;
  const auto add = [&](const Box& box) {
    boxes.push_back({box, begin});
    begin += boxes.back().numel();
  };
  if (slices.empty()) add({Sizes(shape.size(), 0), shape});
  for (const auto& slice : slices)
    for (const auto& box : slice) add(box);
  return boxes;
}

// Calls take(index, numel) for the rows of `common` that are contiguous in both boxes; index: of a row's first element.
template <class Take>
void for_each_row(const Box& common, const Box& a, const Box& b, const Take& take) {
  auto outer = common.size.size();  // dimensions before it are walked
  std::int64_t numel = 1;
  for (bool whole = true; outer > 0 && whole;) {
    --outer;
    numel *= common.size[outer];
    whole = common.size[outer] == a.size[outer] && common.size[outer] == b.size[outer];
  }
  auto index = common.start;
  for (;;) {
    take(index, numel);
    auto d = outer;
    while (d > 0 && ++index[d - 1] == common.start[d - 1] + common.size[d - 1]) {
      index[d - 1] = common.start[d - 1];
      --d;
    }
    if (d == 0) return;
  }
}

// False: nothing is in both.
bool intersect(const Box& a, const Box& b, Box& common) {
  common = a;
  for (std::size_t d = 0; d < a.size.size(); ++d) {
    const auto begin = std::max(a.start[d], b.start[d]);
    const auto end = std::min(a.start[d] + a.size[d], b.start[d] + b.size[d]);
    if (begin >= end) return false;
    common.start[d] = begin;
    common.size[d] = end - begin;
  }
  return true;
}

}  // namespace

std::vector<Run> runs_between(const Sizes& shape, const std::vector<std::vector<Box>>& wanted,
                              const std::vector<std::vector<Box>>& stored, std::int64_t begin, std::int64_t end) {
  if (begin >= end) return {};
  if (wanted == stored) return {{begin, begin, end - begin}};
  std::vector<Run> runs;
  const auto sources = placed(shape, stored);
  for (const auto& target : placed(shape, wanted)) {
    if (target.begin >= end || target.begin + target.numel() <= begin) continue;
    Box common;
    for (const auto& source : sources) {
      if (!intersect(target.box, source.box, common)) continue;
      for_each_row(common, target.box, source.box, [&](const Sizes& index, std::int64_t numel) {
        const auto at = target.at(index);
        const auto first = std::max(at, begin), last = std::min(at + numel, end);
        if (first < last) runs.push_back({first, source.at(index) + (first - at), last - first});
      });
    }
  }
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.stored < b.stored; });
  return runs;
}

}  // namespace zero::formats
