// A sector is 4096 bytes: a stamp with location and version, then constant bytes. Timed windows access only the stamps,
// 256 words per MiB; check_all() checks everything.
#include "lab/bench/io_measurement.h"

#include <zero/errors.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <string>
#include <utility>

namespace zero::cli {
namespace {

constexpr std::int64_t kSector = 4096;
constexpr std::size_t kAhead = 6;
constexpr std::int64_t kLeastTile = 4 << 20;  // an engine's tiles are not smaller

using Clock = IoMeasurement::Clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::uint64_t stamp_of(std::int64_t sector, std::uint32_t version) {
  return (static_cast<std::uint64_t>(sector) << 24 ^ version) * 0x9e3779b97f4a7c15ull;
}

const char* common_part() {
  static const auto part = [] {
    std::vector<char> bytes(kSector);
    std::uint64_t state = 1;
    for (auto& byte : bytes) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      byte = static_cast<char>(state >> 56);
    }
    return bytes;
  }();
  return part.data();
}

void fill(const storage::IoBuffer& buffer) {
  for (std::int64_t at = 0; at + kSector <= buffer.bytes(); at += kSector)
    std::memcpy(static_cast<char*>(buffer.data()) + at, common_part(), kSector);
}

}  // namespace

struct IoMeasurement::Tile {
  std::shared_ptr<Work> work;
  std::size_t buffer = 0;
  std::int64_t offset = 0, bytes = 0;
};

IoMeasurement::IoMeasurement(const std::string& folder, std::int64_t bytes, const storage::IoSettings& settings)
    : file_(storage::SwapFile::create(folder, bytes, settings, "zero bench io")),
      bytes_(bytes),
      versions_(static_cast<std::size_t>(bytes / kSector)) {
  // Just large enough that the tiles in flight fill every queue, because a long-lived file has small buffers.
  const std::int64_t in_flight = settings.block_size * settings.queue_depth * settings.threads;
  tile_ = std::max(kLeastTile, (in_flight / 4 + settings.block_size - 1) / settings.block_size * settings.block_size);
  tile_ = std::min(tile_, bytes / 2);
  auto& all = stream(true, 0, bytes);
  for (std::int64_t at = 0; at < bytes; at += tile_) end(all, begin(all, 0, at));
}

IoMeasurement::Stream& IoMeasurement::stream(bool write, std::int64_t from, std::int64_t to) {
  auto& stream = write ? write_ : read_;
  stream.from = from;
  stream.to = to;
  stream.done_bytes = 0;
  while (stream.buffers.size() < kAhead) {
    stream.buffers.push_back(file_->buffer(tile_));
    if (write) fill(stream.buffers.back());
  }
  return stream;
}

IoMeasurement::Tile IoMeasurement::begin(Stream& stream, std::size_t buffer, std::int64_t offset) {
  Tile tile{nullptr, buffer, offset, std::min(tile_, stream.to - offset)};
  auto* const data = static_cast<char*>(stream.buffers[buffer].data());
  if (stream.write) stamp(data, offset, tile.bytes);
  tile.work = stream.write ? file_->begin_write(offset, data, tile.bytes) : file_->begin_read(offset, data, tile.bytes);
  return tile;
}

void IoMeasurement::end(Stream& stream, const Tile& tile) {
  tile.work->wait();
  stream.done_bytes += tile.bytes;
  if (!stream.write)
    check_stamps(static_cast<const char*>(stream.buffers[tile.buffer].data()), tile.offset, tile.bytes);
}

void IoMeasurement::stamp(char* data, std::int64_t offset, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += kSector) {
    const auto sector = (offset + at) / kSector;
    const auto value = stamp_of(sector, ++versions_[static_cast<std::size_t>(sector)]);
    std::memcpy(data + at, &value, sizeof value);
  }
}

void IoMeasurement::check_stamps(const char* data, std::int64_t offset, std::int64_t bytes) const {
  for (std::int64_t at = 0; at < bytes; at += kSector) {
    const auto sector = (offset + at) / kSector;
    const auto expected = stamp_of(sector, versions_[static_cast<std::size_t>(sector)]);
    if (std::memcmp(data + at, &expected, sizeof expected) != 0)
      throw InternalError("[zero bench io] got other bytes than were written at offset " + std::to_string(offset + at));
  }
}

// Transfers tiles cyclically until `seconds` after `start`, then waits for those in flight.
void IoMeasurement::keep_busy(Stream& stream, Clock::time_point start, double seconds) {
  const auto range = stream.to - stream.from;
  auto next = stream.from;
  const auto step = [&](std::size_t buffer) {
    if (next >= stream.to) next = stream.from;
    auto tile = begin(stream, buffer, next);
    next += tile.bytes;
    return tile;
  };
  // Limited so that no location is in flight twice.
  const auto ahead = std::clamp<std::int64_t>(range / tile_ - 1, 1, kAhead);
  std::vector<Tile> under_way;  // used in turn
  for (std::int64_t k = 0; k < ahead; ++k) under_way.push_back(step(static_cast<std::size_t>(k)));
  std::size_t oldest = 0;
  const auto later = [&] { oldest = (oldest + 1) % under_way.size(); };
  for (; seconds_since(start) < seconds; later()) {
    end(stream, under_way[oldest]);
    under_way[oldest] = step(under_way[oldest].buffer);
  }
  for (std::size_t k = 0; k < under_way.size(); ++k, later()) end(stream, under_way[oldest]);
}

IoMeasurement::Result IoMeasurement::run(IoPattern pattern, double seconds) {
  const bool both = pattern == IoPattern::Mixed;
  const auto half = bytes_ / 2 / kSector * kSector;
  if (pattern != IoPattern::Write) stream(false, 0, both ? half : bytes_);
  if (pattern != IoPattern::Read) stream(true, both ? half : 0, bytes_);
  const auto start = Clock::now();
  Result result;
  if (both) {
    // Each direction waits for its own transfers only.
    auto reading = std::async(std::launch::async, [&] { keep_busy(read_, start, seconds); });
    keep_busy(write_, start, seconds);
    reading.get();
  } else {
    keep_busy(pattern == IoPattern::Read ? read_ : write_, start, seconds);
  }
  const double took = seconds_since(start);
  if (pattern != IoPattern::Write) result.read_bytes_per_s = static_cast<double>(read_.done_bytes) / took;
  if (pattern != IoPattern::Read) result.write_bytes_per_s = static_cast<double>(write_.done_bytes) / took;
  return result;
}

void IoMeasurement::check_all() {
  auto& all = stream(false, 0, bytes_);
  for (std::int64_t offset = 0; offset < bytes_; offset += tile_) {
    const auto tile = begin(all, 0, offset);
    end(all, tile);
    const auto* data = static_cast<const char*>(all.buffers[0].data());
    for (std::int64_t at = 0; at < tile.bytes; at += kSector)
      if (std::memcmp(data + at + 8, common_part() + 8, kSector - 8) != 0)
        throw InternalError("[zero bench io] got other bytes than were written at offset " +
                            std::to_string(offset + at));
  }
}

}  // namespace zero::cli
