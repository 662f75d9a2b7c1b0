// Shared by tests of swap files: bytes that differ at every offset, and whether io_uring is available.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include <zero/errors.h>

#include "storage/fault_source.h"
#include "storage/swap_file.h"
#include "support/folder.h"

namespace zero::test {

using storage::IoSettings;
using storage::SwapFile;

inline constexpr std::int64_t kMiB = 1 << 20;

// Other bytes at every place and for every `salt`.
inline void fill(void* data, std::int64_t bytes, std::int64_t offset, std::uint64_t salt) {
  auto* words = static_cast<std::uint64_t*>(data);
  for (std::int64_t i = 0; i < bytes / 8; ++i)
    words[i] = (static_cast<std::uint64_t>(offset + 8 * i) + salt * 0x1000000000ull) * 0x9e3779b97f4a7c15ull;
}

inline testing::AssertionResult holds(const void* data, std::int64_t bytes, std::int64_t offset, std::uint64_t salt) {
  std::vector<std::uint64_t> expected(static_cast<std::size_t>(bytes / 8));
  fill(expected.data(), bytes, offset, salt);
  if (std::memcmp(expected.data(), data, static_cast<std::size_t>(bytes)) == 0) return testing::AssertionSuccess();
  const auto* got = static_cast<const std::uint64_t*>(data);
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (got[i] != expected[i])
      return testing::AssertionFailure() << "other bytes than were written, first at offset "
                                         << offset + 8 * static_cast<std::int64_t>(i);
  return testing::AssertionFailure();
}

// The n-th request and the `more` after it fail with `fault`; in `direction` only. Requests are counted from 1,
// including those of the test at the start (a write, a read, a write of zeros).
enum class Direction { Both, Reads, Writes };
class NthRequest : public storage::FaultSource {
 public:
  NthRequest(int n, storage::Fault fault, int more = 0, Direction direction = Direction::Both)
      : n_(n), more_(more), fault_(fault), direction_(direction) {}
  storage::Fault request(bool write, std::int64_t offset, std::int64_t bytes) override {
    if (direction_ == Direction::Reads && write) return {};
    if (direction_ == Direction::Writes && !write) return {};
    const int count = ++count_;
    if (count < n_ || count > n_ + more_) return {};
    ++hits_;
    offset_ = offset;
    if (fault_.at_most < 0) return fault_;
    return {0, std::min(bytes - 1, fault_.at_most)};
  }
  int hits() const { return hits_; }
  std::int64_t offset() const { return offset_; }

 private:
  const int n_, more_;
  const storage::Fault fault_;
  const Direction direction_;
  std::atomic<int> count_{0}, hits_{0};
  std::atomic<std::int64_t> offset_{-1};
};

inline bool ring_works() {
  const TempFolder folder;
  IoSettings settings;
  settings.path = IoSettings::Path::Ring;
  try {
    SwapFile::create(folder.text(), kMiB, settings, "rank 0/1");
    return true;
  } catch (const IoError&) {
    return false;
  }
}

inline void expect_round_trip(SwapFile& file) {
  const auto out = file.buffer(kMiB), in = file.buffer(kMiB);
  fill(out.data(), kMiB, 0, 5);
  file.begin_write(0, out.data(), kMiB)->wait();
  file.begin_read(0, in.data(), kMiB)->wait();
  EXPECT_TRUE(holds(in.data(), kMiB, 0, 5));
}

}  // namespace zero::test
