// A swap file over both paths: data, overlap, threads, buffers, and what is left behind.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <zero/errors.h>

#include "storage/fault_source.h"
#include "storage/swap_file.h"
#include "unit/storage/file_samples.h"

namespace zero::storage::file_io_test {
namespace {

using namespace test;
namespace fs = std::filesystem;
using Path = IoSettings::Path;
using On = TempFolder::On;

class EachPath : public testing::TestWithParam<Path> {};
INSTANTIATE_TEST_SUITE_P(SwapFile, EachPath, testing::Values(Path::Ring, Path::Threads),
                         [](const auto& info) { return info.param == Path::Ring ? "Ring" : "Threads"; });

TEST_P(EachPath, GivesBackWhatWasWrittenAtEveryOffsetAndSize) {
  const TempFolder folder;
  for (const bool overlap : {true, false}) {
    IoSettings settings{.block_size = 16 << 10, .queue_depth = 4, .threads = 2, .overlap_events = overlap};
    settings.path = GetParam();
    const auto file = SwapFile::create(folder.text(), 4 * kMiB, settings, "rank 0/1");
    EXPECT_EQ(file->bytes(), 4 * kMiB);
    const auto out = file->buffer(4 * kMiB), in = file->buffer(4 * kMiB);
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(out.data()) % 4096, 0u);
    fill(out.data(), 4 * kMiB, 0, 1);
    std::vector<std::shared_ptr<Work>> works;
    const std::int64_t sizes[] = {4096, 8192, 16384, 20480, 1 << 20, 4096, 36864};
    std::int64_t at = 0;
    for (std::size_t i = 0; at < 4 * kMiB; i = (i + 1) % std::size(sizes)) {
      const auto size = std::min(sizes[i], 4 * kMiB - at);
      works.push_back(file->begin_write(at, static_cast<char*>(out.data()) + at, size));
      at += size;
    }
    for (const auto& work : works) work->wait();
    for (const auto& work : works) EXPECT_TRUE(work->done());
    file->begin_read(0, in.data(), 4 * kMiB)->wait();
    EXPECT_TRUE(holds(in.data(), 4 * kMiB, 0, 1));
    file->begin_read(12288, in.data(), 4096)->wait();
    EXPECT_TRUE(holds(in.data(), 4096, 12288, 1));
    file->begin_read(0, in.data(), 0)->wait();
    const auto stats = file->stats();
    EXPECT_EQ(stats.bytes_written, 4 * kMiB);
    EXPECT_EQ(stats.bytes_read, 4 * kMiB + 4096);
    EXPECT_GE(stats.reads, 4 * kMiB / settings.block_size + 1);
    EXPECT_EQ(stats.retries, 0);
    EXPECT_GT(stats.seconds_busy, 0);
  }
  EXPECT_TRUE(fs::is_empty(folder.text())) << "a file has a name";
}

TEST_P(EachPath, ReadsOvertakeWritesThatWait) {
  const TempFolder folder;
  // Of 128 writes the first waits until the read has begun, and so the others wait, too.
  class HeldWrites : public FaultSource {
   public:
    Fault request(bool write, std::int64_t, std::int64_t) override {
      if (!write) {
        writes_at_read = writes.load();
      } else if (held) {
        ++writes;
        while (held && !read_begun) std::this_thread::yield();
      }
      return {};
    }
    std::atomic<bool> held{false}, read_begun{false};
    std::atomic<int> writes{0}, writes_at_read{-1};
  };
  const auto faults = std::make_shared<HeldWrites>();
  IoSettings settings{.block_size = 8 << 10, .queue_depth = 2};
  settings.path = GetParam();
  const auto file = SwapFile::create(folder.text(), 2 * kMiB, settings, "rank 0/1", faults);
  const auto out = file->buffer(kMiB), in = file->buffer(8 << 10);
  fill(out.data(), kMiB, 0, 1);
  file->begin_write(0, out.data(), kMiB)->wait();
  faults->held = true;
  const auto write = file->begin_write(kMiB, out.data(), kMiB);
  const auto read = file->begin_read(8 << 10, in.data(), 8 << 10);
  faults->read_begun = true;
  read->wait();
  EXPECT_GE(faults->writes_at_read, 0);
  EXPECT_LT(faults->writes_at_read, 64) << "the read waited for the writes";
  EXPECT_TRUE(holds(in.data(), 8 << 10, 8 << 10, 1));
  write->wait();
  EXPECT_EQ(faults->writes, 128);
}

TEST_P(EachPath, ManyThreadsBeginAndWaitAtOnce) {
  const TempFolder folder;
  IoSettings settings{.block_size = 16 << 10, .queue_depth = 4, .threads = 2};
  settings.path = GetParam();
  const auto file = SwapFile::create(folder.text(), 4 * kMiB, settings, "rank 0/1");
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      const std::int64_t from = t * kMiB;
      std::mt19937_64 random(static_cast<std::uint64_t>(t));
      const auto out = file->buffer(256 << 10), in = file->buffer(256 << 10);
      for (int i = 0; i < 50; ++i) {
        const auto size = 4096 * static_cast<std::int64_t>(1 + random() % 64);
        const auto at = from + 4096 * static_cast<std::int64_t>(random() % (256 - size / 4096 + 1));
        fill(out.data(), size, at, static_cast<std::uint64_t>(i));
        file->begin_write(at, out.data(), size)->wait();
        std::memset(in.data(), 0, static_cast<std::size_t>(size));
        file->begin_read(at, in.data(), size)->wait();
        if (holds(in.data(), size, at, static_cast<std::uint64_t>(i))) ++good;
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(good, 200);
}

TEST_P(EachPath, ClosingEndsWhatHasNotBegun) {
  const TempFolder folder;
  for (int round = 0; round < 20; ++round) {
    std::vector<std::shared_ptr<Work>> works;
    IoBuffer out;
    {
      IoSettings settings{.block_size = 4096, .queue_depth = 2};
      settings.path = GetParam();
      const auto file = SwapFile::create(folder.text(), kMiB, settings, "rank 0/1");
      out = file->buffer(kMiB);
      for (std::int64_t at = 0; at < kMiB; at += 64 << 10)
        works.push_back(file->begin_write(at, static_cast<char*>(out.data()) + at, 64 << 10));
    }
    int failed = 0;
    for (const auto& work : works) {
      ASSERT_TRUE(work->done());
      try {
        work->wait();
      } catch (const IoError& error) {
        EXPECT_NE(std::string(error.what()).find("closed"), std::string::npos);
        ++failed;
      }
    }
    static_cast<void>(failed);                     // how many is a matter of time
    static_cast<char*>(out.data())[kMiB - 1] = 1;  // the memory outlives the file
  }
}

TEST(Buffers, AreUsedAgain) {
  const TempFolder folder;
  const auto file = SwapFile::create(folder.text(), kMiB, {}, "rank 0/1");
  void* first = nullptr;
  {
    const auto one = file->buffer(3 * kMiB);
    EXPECT_EQ(one.bytes(), 3 * kMiB);
    first = one.data();
    const auto other = file->buffer(3 * kMiB);
    EXPECT_NE(other.data(), first);
  }
  auto again = file->buffer(3 * kMiB);
  const auto moved = std::move(again);
  EXPECT_EQ(again.data(), nullptr);
  const auto more = file->buffer(3 * kMiB);
  EXPECT_TRUE(moved.data() == first || more.data() == first);
  EXPECT_EQ(file->buffer(0).data(), nullptr);
}

TEST(Transfers, OutOfPlaceAreRefused) {
  const TempFolder folder;
  const auto file = SwapFile::create(folder.text(), kMiB, {}, "rank 0/1");
  const auto buffer = file->buffer(kMiB);
  auto* const data = static_cast<char*>(buffer.data());
  EXPECT_THROW(file->begin_read(1, data, 4096), InternalError);
  EXPECT_THROW(file->begin_read(0, data, 100), InternalError);
  EXPECT_THROW(file->begin_read(0, data + 8, 4096), InternalError);
  EXPECT_THROW(file->begin_read(kMiB, data, 4096), InternalError);
  EXPECT_THROW(file->begin_write(-4096, data, 4096), InternalError);
  EXPECT_THROW(file->begin_write(4096, data, kMiB), InternalError);
}

TEST(Transfers, LeaveNoDescriptorThreadOrMemoryBehind) {
  const TempFolder folder;
  const auto count = [](const char* what) {
    return std::distance(fs::directory_iterator(std::string("/proc/self/") + what), fs::directory_iterator());
  };
  const auto cycle = [&] { expect_round_trip(*SwapFile::create(folder.text(), kMiB, {}, "rank 0/1")); };
  cycle();
  const auto descriptors = count("fd"), tasks = count("task");
  for (int i = 0; i < 50; ++i) cycle();
  EXPECT_EQ(count("fd"), descriptors);
  EXPECT_EQ(count("task"), tasks);
}

}  // namespace
}  // namespace zero::storage::file_io_test
