#include "sharding/tensor_cut.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/check.h"

namespace zero::sharding {
namespace {

constexpr const char* kPieces = ". Hint: \"shape\" lists the rows of all parts of a fused weight";

std::int64_t product(const std::vector<std::int64_t>& sizes, std::size_t begin, std::size_t end) {
  return std::accumulate(sizes.begin() + static_cast<std::ptrdiff_t>(begin),
                         sizes.begin() + static_cast<std::ptrdiff_t>(end), std::int64_t{1}, std::multiplies<>());
}

}  // namespace

Range cut_range(std::int64_t n, std::int64_t multiple, int part, int parts) {
  const auto count = n / multiple;
  return {part * count / parts * multiple, (part + 1) * count / parts * multiple};
}

std::string TensorCut::fault() const {
  if (dim < 0 || dim >= static_cast<int>(sizes.size()))
    return base::join("has ", sizes.size(), " dimensions, expected more than ", dim);
  const auto length = sizes[static_cast<std::size_t>(dim)];
  if (multiple < 1) return base::join("got a multiple of ", multiple, ", expected 1 or more");
  for (const auto piece : pieces)
    if (piece < 0 || piece > length)
      return base::join("dimension ", dim, " has ", length, " elements, got a piece of ", piece, kPieces);
  const auto sum = std::accumulate(pieces.begin(), pieces.end(), std::int64_t{0});
  if (!pieces.empty() && sum != length)
    return base::join("dimension ", dim, " has ", length, " elements, expected ", sum, ", the sum of its pieces",
                      kPieces);
  for (const auto piece : pieces.empty() ? std::vector<std::int64_t>{length} : pieces) {
    if (piece % multiple != 0)
      return base::join(pieces.empty() ? "dimension " : "a piece of dimension ", dim, " has ", piece,
                        " elements, expected a multiple of ", multiple,
                        ". Hint: \"multiple\" is the width of a head or block");
    const auto blocks = piece / multiple;
    if (blocks < parts)
      return base::join("dimension ", dim, " has ", blocks,
                        multiple == 1 ? blocks == 1 ? " element" : " elements"
                        : blocks == 1 ? " head or block"
                                      : " heads or blocks",
                        ", expected at least ", parts, ", one a rank. Hint: tensor_parallel.autotp_size ",
                        blocks > 1 ? base::join(blocks, " or less") : "1");
  }
  return "";
}

std::vector<Range> TensorCut::ranges(int part) const {
  std::vector<Range> result;
  std::int64_t begin = 0;
  const auto add = [&](std::int64_t piece) {
    const auto range = cut_range(piece, multiple, part, parts);
    result.push_back({begin + range.begin, begin + range.end});
    begin += piece;
  };
  if (pieces.empty()) add(sizes[static_cast<std::size_t>(dim)]);
  for (const auto piece : pieces) add(piece);
  return result;
}

std::vector<std::int64_t> TensorCut::part_sizes(int part) const {
  auto result = sizes;
  auto& length = result[static_cast<std::size_t>(dim)];
  length = 0;
  for (const auto& range : ranges(part)) length += range.numel();
  return result;
}

std::int64_t TensorCut::numel() const { return product(sizes, 0, sizes.size()); }

std::int64_t TensorCut::part_numel(int part) const {
  const auto part_of = part_sizes(part);
  return product(part_of, 0, part_of.size());
}

std::vector<TensorCut::Run> TensorCut::runs(int part, std::int64_t begin, std::int64_t end) const {
  const auto at = static_cast<std::size_t>(dim);
  const auto outer = product(sizes, 0, at), inner = product(sizes, at + 1, sizes.size());
  const auto held = ranges(part);
  std::vector<Run> result;
  std::int64_t position = 0;  // in the part
  for (std::int64_t o = 0; o < outer; ++o)
    for (const auto& range : held) {
      const auto numel = range.numel() * inner, whole = (o * sizes[at] + range.begin) * inner;
      const auto first = std::max(begin, position), last = std::min(end, position + numel);
      if (first < last) {
        const auto from = whole + first - position;
        if (!result.empty() && result.back().whole_begin + result.back().numel == from)
          result.back().numel += last - first;
        else
          result.push_back({first, from, last - first});
      }
      position += numel;
    }
  return result;
}

}  // namespace zero::sharding
