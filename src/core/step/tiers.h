// Arithmetic for states on other tiers than the device: how they are divided, counted and buffered. Used by the engine
// and the step program. No tensors, no files.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "kernels/elementwise.h"
#include "step/precision.h"

namespace zero::step {

// Bytes. Regions of a file begin at multiples of it, and transfers are multiples of it.
inline constexpr std::int64_t kFileBlock = 4096;
constexpr std::int64_t whole_blocks(std::int64_t bytes) { return (bytes + kFileBlock - 1) / kFileBlock * kFileBlock; }

// Bytes of host memory for the checksums of `bytes` bytes of a file: 8 per block.
constexpr std::int64_t checksum_bytes(std::int64_t bytes) { return bytes / kFileBlock * 8; }

// Elements. A group is divided between tiers at multiples of it: whole blocks of a file in the narrowest dtype.
inline constexpr std::int64_t kCutNumel = kFileBlock / 2;
// The number of elements that a ratio moves off the device.
inline std::int64_t moved_numel(std::int64_t numel, double ratio) {
  const auto cut = std::ceil(static_cast<double>(numel) * ratio / kCutNumel) * kCutNumel;
  return std::min(numel, static_cast<std::int64_t>(cut));
}

// Bytes before a gradient that peers read in place.
inline constexpr std::int64_t kReadableOverhead = 64;

// Number of shards that are fetched from a file beyond the one gathered ahead. By default one of three buffers is in
// use and two are being filled; offload_param.buffer_count overrides the three.
constexpr int shards_fetched_ahead(std::optional<std::int64_t> buffer_count) {
  return static_cast<int>(std::clamp<std::int64_t>(buffer_count.value_or(3) - 1, 0, 64));
}

// Elements per tile of an update through host memory, for a limit in elements (0: the smallest size). Large enough for
// the disk and for all cores; whole blocks of a file in the narrowest dtype, or of states in blocks of codes.
constexpr std::int64_t tile_numel(std::int64_t limit, Dtype slots) {
  constexpr std::int64_t kMost = std::int64_t{1} << 20;
  static_assert(kMost >= 4 * kernels::kMostSerialNumel, "all threads update a tile of the usual size");
  const std::int64_t least = slots == Dtype::U8 ? std::int64_t{1} << 18 : std::int64_t{1} << 13;
  static_assert(kernels::state_block_bytes(std::int64_t{1} << 18) % kFileBlock == 0);
  return std::max(std::min(limit, kMost) / least * least, least);
}

// Number of tiles in host memory: one is updated, one written, the others read during backward.
// offload_optimizer.buffer_count overrides it, counted as in DeepSpeed: gradient, master and optimizer states.
constexpr std::int64_t tiles_at_once(std::optional<std::int64_t> buffer_count, int num_slots) {
  return std::clamp<std::int64_t>(buffer_count ? *buffer_count / (num_slots + 2) : 6, 1, 64);
}

}  // namespace zero::step
