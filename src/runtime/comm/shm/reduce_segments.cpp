#include "comm/shm/reduce_segments.h"

#include <algorithm>
#include <cstring>

#include <ATen/Parallel.h>

#include "comm/collective_call.h"
#include "kernels/elementwise.h"

namespace zero::comm::shm {
namespace {

// Calls fn(segment, first, numel) for the part of each segment in elements [begin, end) of the vector; `first` is the
// offset in the segment.
template <class Fn>
void for_each_in(const std::vector<TensorSegment>& vector, std::int64_t begin, std::int64_t end, Fn fn) {
  auto it = std::upper_bound(vector.begin(), vector.end(), begin,
                             [](std::int64_t at, const TensorSegment& s) { return at < s.begin; });
  if (it != vector.begin()) --it;
  for (; it != vector.end() && it->begin < end; ++it) {
    const auto first = std::max(begin, it->begin), last = std::min(end, it->begin + it->data.numel());
    if (first < last) fn(static_cast<std::size_t>(it - vector.begin()), first - it->begin, last - first);
  }
}

}  // namespace

void sum_own_part(const PeerReduce& sum, const Places& places, int rank) {
  const auto dtype = sum_dtype(sum.vector[0].data.scalar_type());
  const auto element = static_cast<std::int64_t>(sum.vector[0].data.element_size());
  const auto shard_begin = rank * sum.shard_numel;
  std::vector<const void*> parts(places.size());
  // A single thread uses steps that stay in its cache until `summed` has read them; several threads need larger steps.
  const auto threads = at::get_num_threads();
  const auto step = threads == 1 ? kSummedNumel : 32 * threads * kSummedNumel;
  for (std::int64_t begin = 0; begin < sum.shard_numel; begin += step) {
    const auto end = std::min(begin + step, sum.shard_numel);
    for_each_in(
        sum.vector, shard_begin + begin, shard_begin + end, [&](std::size_t i, std::int64_t first, std::int64_t numel) {
          for (std::size_t r = 0; r < places.size(); ++r) parts[r] = places[r][i] + first * element;
          auto* const out =
              sum.out.defined()
                  ? static_cast<std::byte*>(sum.out.data_ptr()) + (sum.vector[i].begin + first - shard_begin) * element
                  : static_cast<std::byte*>(sum.vector[i].data.data_ptr()) + first * element;
          kernels::sum_parts(out, dtype, parts.data(), static_cast<int>(parts.size()), dtype, numel);
        });
    if (sum.summed) sum.summed(begin, end);
  }
}

void copy_other_parts(const PeerReduce& sum, const Places& places, int rank) {
  const auto element = static_cast<std::int64_t>(sum.vector[0].data.element_size());
  for (std::size_t r = 0; r < places.size(); ++r) {
    if (static_cast<int>(r) == rank) continue;
    const auto begin = static_cast<std::int64_t>(r) * sum.shard_numel;
    for_each_in(sum.vector, begin, begin + sum.shard_numel, [&](std::size_t i, std::int64_t first, std::int64_t numel) {
      auto* const to = static_cast<std::byte*>(sum.vector[i].data.data_ptr()) + first * element;
      const auto* const from = places[r][i] + first * element;
      kernels::parallel_ranges(
          numel * element,
          [=](std::int64_t a, std::int64_t b) { std::memcpy(to + a, from + a, static_cast<std::size_t>(b - a)); },
          kernels::kMostSerialBytes);
    });
  }
}

}  // namespace zero::comm::shm
