#include "sharding/shard_layout.h"

#include <algorithm>

#include "base/check.h"

namespace zero::sharding {
namespace {
std::int64_t round_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }
}  // namespace

ShardLayout::ShardLayout(std::vector<std::int64_t> numels, int world, std::int64_t alignment)
    : numels_(std::move(numels)), world_(world) {
  ZERO_CHECK(world >= 1 && alignment >= 1, "shard layout for world ", world, ", alignment ", alignment);
  std::int64_t end = 0;
  for (const auto numel : numels_) {
    ZERO_CHECK(numel >= 0, "a parameter of ", numel, " elements");
    const auto begin = round_up(end, alignment);
    if (begin > end) gaps_.push_back({end, begin - end});
    offsets_.push_back(begin);
    numel_ += numel;
    end = begin + numel;
  }
  padded_ = round_up(end, alignment * world);
  if (padded_ > end) gaps_.push_back({end, padded_ - end});
}

std::vector<ShardLayout::Piece> ShardLayout::pieces(std::int64_t begin, std::int64_t numel) const {
  std::vector<Piece> result;
  const auto end = begin + numel;
  for (std::size_t i = 0; i < numels_.size(); ++i) {
    const auto first = std::max(begin, offsets_[i]), last = std::min(end, offsets_[i] + numels_[i]);
    if (first < last) result.push_back({i, first - offsets_[i], first - begin, last - first});
  }
  return result;
}

}  // namespace zero::sharding
