// See copy.h: the size from which results are streamed, and the size of the pieces.
#include "comm/shm/copy.h"

#include <algorithm>
#include <cstdint>

#include "kernels/cache_size.h"

namespace zero::comm::shm {
namespace {

// Small compared to a last-level cache, large compared to hardware prefetch.
constexpr std::int64_t kPieceBytes = 1 << 20;

}  // namespace

kernels::Stores stores_for(std::size_t bytes, int ranks) {
  // Measured: up to this size plain stores are faster, because part of the data is still cached when it is used.
  const std::size_t most = kernels::last_level_cache_bytes() / 3 * 4;
  const bool large = bytes > most / (static_cast<std::size_t>(ranks) + 1);
  return large ? kernels::Stores::Streaming : kernels::Stores::Cached;
}

void gather_parts(std::byte* out, const std::vector<const std::byte*>& parts, std::size_t bytes, int first,
                  kernels::Stores stores) {
  const auto length = static_cast<std::int64_t>(bytes);
  const auto ranks = static_cast<std::int64_t>(parts.size());
  const auto copy = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = 0; i < ranks; ++i) {
      const auto rank = (first + i) % ranks;
      const auto* const part = parts[static_cast<std::size_t>(rank)];
      if (part != nullptr) kernels::copy(out + rank * length + begin, part + begin, end - begin, stores);
    }
  };
  if (stores == kernels::Stores::Cached) return copy(0, length);
  kernels::parallel_ranges(
      length,
      [&](std::int64_t begin, std::int64_t end) {
        for (; begin < end; begin += kPieceBytes) copy(begin, std::min(end, begin + kPieceBytes));
      },
      kernels::kMostSerialBytes);
}

}  // namespace zero::comm::shm
