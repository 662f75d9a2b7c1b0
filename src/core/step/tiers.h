// How states are cut, counted and buffered where they rest away from the device, as arithmetic: for the engine, which
// acts on it, and for the step program (src/step), which counts ahead of it. No tensors, no files.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

namespace zero::step {

inline constexpr std::int64_t kMasterWidth = 4;  // bytes an element: masters and moments are fp32
// Bytes: regions of a file begin at multiples of it, and transfers are multiples of it.
inline constexpr std::int64_t kFileBlock = 4096;
constexpr std::int64_t whole_blocks(std::int64_t bytes) { return (bytes + kFileBlock - 1) / kFileBlock * kFileBlock; }

// Host memory, in bytes, for the checksums of so many bytes of a file: 8 a block.
constexpr std::int64_t checksum_bytes(std::int64_t bytes) { return bytes / kFileBlock * 8; }

// Elements: a group is cut between tiers at multiples of it, whole blocks of a file in the narrowest dtype.
inline constexpr std::int64_t kCutNumel = kFileBlock / 2;
// Of `numel` elements those that a ratio moves off the device.
inline std::int64_t moved_numel(std::int64_t numel, double ratio) {
  const auto cut = std::ceil(static_cast<double>(numel) * ratio / kCutNumel) * kCutNumel;
  return std::min(numel, static_cast<std::int64_t>(cut));
}

// Bytes in front of a gradient that ranks read where it lies.
inline constexpr std::int64_t kReadableOverhead = 64;

// Shards on their way from a file behind the one gathered ahead: a buffer is in use, two have shards arriving unless
// offload_param.buffer_count says otherwise.
constexpr int shards_fetched_ahead(std::optional<std::int64_t> buffer_count) {
  return static_cast<int>(std::clamp<std::int64_t>(buffer_count.value_or(3) - 1, 0, 64));
}

// Elements of a tile of an update through host memory, for a limit in elements (0: the smallest): long enough for the
// disk and for all cores, whole blocks of a file in the narrowest dtype.
constexpr std::int64_t tile_numel(std::int64_t limit) {
  constexpr std::int64_t kMost = std::int64_t{1} << 20, kLeast = std::int64_t{1} << 13;
  return std::max(std::min(limit, kMost) / kLeast * kLeast, kLeast);
}

// Such tiles in host memory at once: one being updated, one on its way back, and what can be read while backward still
// runs; or as many as offload_optimizer.buffer_count holds, counted as DeepSpeed does: gradient, master and moments.
constexpr std::int64_t tiles_at_once(std::optional<std::int64_t> buffer_count, int num_slots) {
  return std::clamp<std::int64_t>(buffer_count ? *buffer_count / (num_slots + 2) : 6, 1, 64);
}

}  // namespace zero::step
