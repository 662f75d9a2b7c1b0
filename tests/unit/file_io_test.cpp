// A swap file over both paths: data, overlap, every result that a request may have, full disks and
// limits, private folders and what is left of them.
#include <gtest/gtest.h>

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <zero/errors.h>
#include <zero/log.h>

#include "storage/fault_source.h"
#include "storage/leftovers.h"
#include "storage/storage_file.h"
#include "storage/swap_file.h"

namespace {

using namespace zero;
using namespace zero::storage;
namespace fs = std::filesystem;
using Path = IoSettings::Path;

constexpr std::int64_t kMiB = 1 << 20;

// Beside the build, where a disk is; or in memory, if there is such a place: for what depends on requests
// alone and takes many.
enum class On { Disk, Memory };
class TemporaryFolder {
 public:
  explicit TemporaryFolder(On on = On::Disk) {
    const bool memory = on == On::Memory && access("/dev/shm", W_OK) == 0 && free_bytes_of("/dev/shm") > 32 * kMiB;
    std::string name = (fs::path(memory ? "/dev/shm" : ZERO_BINARY_DIR) / "file_io_XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Other bytes at every place and for every `salt`.
void fill(void* data, std::int64_t bytes, std::int64_t offset, std::uint64_t salt) {
  auto* words = static_cast<std::uint64_t*>(data);
  for (std::int64_t i = 0; i < bytes / 8; ++i)
    words[i] = (static_cast<std::uint64_t>(offset + 8 * i) + salt * 0x1000000000ull) * 0x9e3779b97f4a7c15ull;
}

testing::AssertionResult holds(const void* data, std::int64_t bytes, std::int64_t offset, std::uint64_t salt) {
  std::vector<std::uint64_t> expected(static_cast<std::size_t>(bytes / 8));
  fill(expected.data(), bytes, offset, salt);
  if (std::memcmp(expected.data(), data, static_cast<std::size_t>(bytes)) == 0) return testing::AssertionSuccess();
  const auto* got = static_cast<const std::uint64_t*>(data);
  for (std::size_t i = 0; i < expected.size(); ++i)
    if (got[i] != expected[i])
      return testing::AssertionFailure() << "other bytes than were written, first at offset " << offset + 8 * static_cast<std::int64_t>(i);
  return testing::AssertionFailure();
}

class EachPath : public testing::TestWithParam<Path> {};
INSTANTIATE_TEST_SUITE_P(SwapFile, EachPath, testing::Values(Path::Ring, Path::Threads),
                         [](const auto& info) { return info.param == Path::Ring ? "Ring" : "Threads"; });

TEST_P(EachPath, GivesBackWhatWasWrittenAtEveryOffsetAndSize) {
  const TemporaryFolder folder;
  for (const bool overlap : {true, false}) {
    IoSettings settings{.block_size = 16 << 10, .queue_depth = 4, .threads = 2, .overlap_events = overlap};
    settings.path = GetParam();
    const auto file = SwapFile::create(folder.path(), 4 * kMiB, settings, "rank 0/1");
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
  EXPECT_TRUE(fs::is_empty(folder.path())) << "a file has a name";
}


// The n-th request sent (counted from 1, the proof's at the start among them: a write, a read, a write of zeros) and the `more`
// after it meet `fault`; in `direction` only.
enum class Direction { Both, Reads, Writes };
class NthRequest : public FaultSource {
 public:
  NthRequest(int n, Fault fault, int more = 0, Direction direction = Direction::Both)
      : n_(n), more_(more), fault_(fault), direction_(direction) {}
  Fault request(bool write, std::int64_t offset, std::int64_t bytes) override {
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
  const Fault fault_;
  const Direction direction_;
  std::atomic<int> count_{0}, hits_{0};
  std::atomic<std::int64_t> offset_{-1};
};

struct Outcome {
  int hits = 0;
  std::string error;        // of create, or of the first transfer that failed
  bool created = false;
  std::int64_t retries = 0;
  std::string description;
};

// Writes eight tiles, reads them, writes others over half of them while the rest is read. Checks
// all data of transfers that did not fail.
Outcome run_with(Path path, const std::shared_ptr<NthRequest>& faults, const std::string& folder) {
  constexpr std::int64_t kTile = 32 << 10, kTiles = 8;
  Outcome outcome;
  IoSettings settings{.block_size = 8 << 10, .queue_depth = 3};
  settings.path = path;
  const auto note = [&](const std::shared_ptr<Work>& work) {
    try {
      work->wait();
      return true;
    } catch (const IoError& error) {
      if (outcome.error.empty()) outcome.error = error.what();
      EXPECT_THROW(work->wait(), IoError) << "the second wait does not throw";
      return false;
    }
  };
  try {
    const auto file = SwapFile::create(folder, kTile * kTiles, settings, "rank 2/4", faults);
    outcome.created = true;
    const auto out = file->buffer(kTile * kTiles), in = file->buffer(kTile * kTiles);
    const auto at = [](const IoBuffer& buffer, std::int64_t tile) { return static_cast<char*>(buffer.data()) + tile * kTile; };
    std::vector<int> salt(kTiles, -1);  // -1: the write failed
    for (int round = 0; round < 3; ++round) {
      std::vector<std::shared_ptr<Work>> writes(kTiles), reads(kTiles);
      for (std::int64_t t = 0; t < kTiles; ++t) {
        if (round == 0 || (t % 2 == 0) == (round == 1)) {
          fill(at(out, t), kTile, t * kTile, static_cast<std::uint64_t>(round));
          writes[t] = file->begin_write(t * kTile, at(out, t), kTile);
        } else {
          std::memset(at(in, t), 0, kTile);
          reads[t] = file->begin_read(t * kTile, at(in, t), kTile);
        }
      }
      for (std::int64_t t = 0; t < kTiles; ++t) {
        if (writes[t]) salt[t] = note(writes[t]) ? round : -1;
        if (reads[t] && note(reads[t]) && salt[t] >= 0) {
          EXPECT_TRUE(holds(at(in, t), kTile, t * kTile, static_cast<std::uint64_t>(salt[t])));
        }
      }
    }
    for (std::int64_t t = 0; t < kTiles; ++t) {
      std::memset(at(in, t), 0, kTile);
      if (note(file->begin_read(t * kTile, at(in, t), kTile)) && salt[t] >= 0) {
        EXPECT_TRUE(holds(at(in, t), kTile, t * kTile, static_cast<std::uint64_t>(salt[t])));
      }
    }
    outcome.retries = file->stats().retries;
    outcome.description = file->description();
  } catch (const IoError& error) {
    if (outcome.error.empty()) outcome.error = error.what();
  }
  outcome.hits = faults->hits();
  return outcome;
}

constexpr int kMostRequests = 100;

TEST_P(EachPath, AShortInterruptedOrRefusedRequestIsSentAgain) {
  const TemporaryFolder disk, memory(On::Memory);
  for (const Fault fault : {Fault{0, 4096}, Fault{0, 5000}, Fault{0, 100}, Fault{EINTR}, Fault{EAGAIN}}) {
    for (int n = 1; n <= kMostRequests; ++n) {
      // Only a disk minds where the rest begins.
      const auto& folder = fault.at_most == 5000 && n % 5 == 0 ? disk : memory;
      SCOPED_TRACE(testing::Message() << "request " << n << ", errno " << fault.error << ", at most " << fault.at_most);
      const auto outcome = run_with(GetParam(), std::make_shared<NthRequest>(n, fault), folder.path());
      EXPECT_EQ(outcome.error, "");
      EXPECT_EQ(outcome.hits, 1);
      EXPECT_EQ(outcome.retries, n <= 3 ? 0 : 1);
    }
  }
}

TEST_P(EachPath, AFullDiskAtAnyRequestIsAnErrorThatSaysWhereAndHowMuch) {
  const TemporaryFolder folder(On::Memory);
  for (const int error : {ENOSPC, EDQUOT, EFBIG}) {
    for (int n = 1; n <= kMostRequests / 3; ++n) {
      SCOPED_TRACE(testing::Message() << "write " << n << ", errno " << error);
      const auto faults = std::make_shared<NthRequest>(n, Fault{error}, 0, Direction::Writes);
      const auto outcome = run_with(GetParam(), faults, folder.path());
      ASSERT_EQ(outcome.hits, 1);
      for (const auto& part : {std::string("SwapFile::write"), folder.path(), "offset " + std::to_string(faults->offset()),
                               std::string(strerrorname_np(error)), std::string("rank 2/4"), std::string("bytes are free")})
        EXPECT_NE(outcome.error.find(part), std::string::npos) << part << " is not in: " << outcome.error;
    }
  }
}

TEST_P(EachPath, AFailedReadIsAnErrorWithoutARetry) {
  const TemporaryFolder folder(On::Memory);
  for (int n = 1; n <= kMostRequests / 2; ++n) {
    SCOPED_TRACE(testing::Message() << "read " << n);
    const auto faults = std::make_shared<NthRequest>(n, Fault{EIO}, 0, Direction::Reads);
    const auto outcome = run_with(GetParam(), faults, folder.path());
    ASSERT_EQ(outcome.hits, 1);
    EXPECT_EQ(outcome.retries, 0);
    for (const auto& part : {std::string("SwapFile::read"), folder.path(), "offset " + std::to_string(faults->offset()),
                             std::string("EIO"), std::string("checkpoint")})
      EXPECT_NE(outcome.error.find(part), std::string::npos) << part << " is not in: " << outcome.error;
  }
}

TEST_P(EachPath, AFailedWriteGoesToASecondFileAndStaysThere) {
  const TemporaryFolder folder(On::Memory);
  for (const int error : {EIO, EROFS, ENODEV}) {
    for (int n = 3; n <= kMostRequests / 2; ++n) {
      SCOPED_TRACE(testing::Message() << "write " << n << ", errno " << error);
      const auto outcome = run_with(GetParam(), std::make_shared<NthRequest>(n, Fault{error}, 0, Direction::Writes), folder.path());
      EXPECT_EQ(outcome.error, "");
      EXPECT_EQ(outcome.hits, 1);
      EXPECT_EQ(outcome.retries, 1);
    }
  }
  // Many in a row: each failed range has its own place, and places are read and written again.
  const auto many = run_with(GetParam(), std::make_shared<NthRequest>(5, Fault{EIO}, 0, Direction::Writes), folder.path());
  EXPECT_EQ(many.error, "");
}

TEST_P(EachPath, AWriteThatFailsHalfwayGoesWholeToTheSecondFile) {
  const TemporaryFolder folder;
  class ShortThenBroken : public FaultSource {
   public:
    Fault request(bool write, std::int64_t, std::int64_t) override {
      const int count = write && armed ? ++count_ : 0;
      return count == 1 ? Fault{0, 8192} : count == 2 ? Fault{EIO} : Fault{};
    }
    std::atomic<bool> armed{false};

   private:
    std::atomic<int> count_{0};
  };
  const auto faults = std::make_shared<ShortThenBroken>();
  constexpr std::int64_t kSize = 64 << 10;
  IoSettings settings{.block_size = kSize, .queue_depth = 1};
  settings.path = GetParam();
  const auto file = SwapFile::create(folder.path(), kSize, settings, "rank 0/1", faults);
  const auto out = file->buffer(kSize), in = file->buffer(kSize);
  fill(out.data(), kSize, 0, 1);
  faults->armed = true;
  file->begin_write(0, out.data(), kSize)->wait();
  EXPECT_EQ(file->stats().retries, 2);
  std::memset(in.data(), 0, kSize);
  file->begin_read(0, in.data(), kSize)->wait();
  EXPECT_TRUE(holds(in.data(), kSize, 0, 1));
}

// A range of the file that can never be written.
class BadRange : public FaultSource {
 public:
  BadRange(std::int64_t from, std::int64_t to) : from_(from), to_(to) {}
  Fault request(bool write, std::int64_t offset, std::int64_t bytes) override {
    return write && armed && offset < to_ && offset + bytes > from_ ? Fault{EIO} : Fault{};
  }
  std::atomic<bool> armed{false};

 private:
  const std::int64_t from_, to_;
};

TEST_P(EachPath, RangesThatWereMovedAreReadAndWrittenInAnyPieces) {
  const TemporaryFolder folder;
  constexpr std::int64_t kSize = 1 << 20;
  IoSettings settings{.block_size = 32 << 10, .queue_depth = 4};
  settings.path = GetParam();
  // The second file begins at offset 0, too: only places in the first one beyond its length are bad.
  const auto faults = std::make_shared<BadRange>(600 << 10, 700 << 10);
  const auto file = SwapFile::create(folder.path(), kSize, settings, "rank 0/1", faults);
  const auto out = file->buffer(kSize), in = file->buffer(kSize);
  faults->armed = true;
  std::mt19937_64 random(7);
  for (int round = 0; round < 40; ++round) {
    std::vector<std::shared_ptr<Work>> works;
    fill(out.data(), kSize, 0, static_cast<std::uint64_t>(round));
    for (std::int64_t at = 0; at < kSize;) {
      const auto size = std::min<std::int64_t>(kSize - at, 4096 * static_cast<std::int64_t>(1 + random() % 40));
      works.push_back(file->begin_write(at, static_cast<char*>(out.data()) + at, size));
      at += size;
    }
    for (const auto& work : works) work->wait();
    works.clear();
    std::memset(in.data(), 0, kSize);
    for (std::int64_t at = 0; at < kSize;) {
      const auto size = std::min<std::int64_t>(kSize - at, 4096 * static_cast<std::int64_t>(1 + random() % 40));
      works.push_back(file->begin_read(at, static_cast<char*>(in.data()) + at, size));
      at += size;
    }
    for (const auto& work : works) work->wait();
    ASSERT_TRUE(holds(in.data(), kSize, 0, static_cast<std::uint64_t>(round))) << round;
  }
  EXPECT_GE(file->stats().retries, 4);
}

TEST_P(EachPath, AWriteThatFailsInTheSecondFileTooIsAnError) {
  const TemporaryFolder folder(On::Memory);
  const auto outcome = run_with(GetParam(), std::make_shared<NthRequest>(2, Fault{EIO}, 1000, Direction::Writes), folder.path());
  EXPECT_NE(outcome.error.find("second file"), std::string::npos) << outcome.error;
}

TEST_P(EachPath, EndlessRefusalsAndEmptyResultsEnd) {
  const TemporaryFolder folder(On::Memory);
  for (const auto direction : {Direction::Reads, Direction::Writes}) {
    const bool reads = direction == Direction::Reads;
    const auto none = run_with(GetParam(), std::make_shared<NthRequest>(2, Fault{0, 0}, 0, direction), folder.path());
    EXPECT_NE(none.error.find(reads ? "the file's end" : "ENOSPC"), std::string::npos) << none.error;
    const auto little = run_with(GetParam(), std::make_shared<NthRequest>(2, Fault{0, 100}, 100000, direction), folder.path());
    EXPECT_NE(little.error.find("twice in a row"), std::string::npos) << little.error;
  }
}

TEST_P(EachPath, RefusalsOfOneRequestEndAfterAWhile) {
  const TemporaryFolder folder(On::Memory);
  // One request alone is refused 150 times: the ring gives it to a plain call, threads report it.
  const auto faults = std::make_shared<NthRequest>(4, Fault{EAGAIN}, GetParam() == Path::Ring ? 149 : 99, Direction::Writes);
  IoSettings settings{.block_size = 8 << 10, .queue_depth = 1};
  settings.path = GetParam();
  const auto file = SwapFile::create(folder.path(), kMiB, settings, "rank 0/1", faults);
  const auto out = file->buffer(8 << 10), in = file->buffer(8 << 10);
  fill(out.data(), 8 << 10, 0, 3);
  file->begin_write(0, out.data(), 8 << 10)->wait();
  const auto work = file->begin_write(0, out.data(), 8 << 10);
  if (GetParam() == Path::Threads) {
    try {
      work->wait();
      ADD_FAILURE() << "no error";
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find("EAGAIN"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("100 times"), std::string::npos) << error.what();
    }
  } else {
    work->wait();
    EXPECT_EQ(faults->hits(), 150);
  }
  // What comes after it goes its way again.
  file->begin_write(0, out.data(), 8 << 10)->wait();
  file->begin_read(0, in.data(), 8 << 10)->wait();
  EXPECT_TRUE(holds(in.data(), 8 << 10, 0, 3));
}

TEST_P(EachPath, WithoutDirectTransfersThePageCacheIsUsedAndNamed) {
  const TemporaryFolder folder;
  for (int n = 1; n <= 2; ++n) {
    const auto direction = n == 1 ? Direction::Writes : Direction::Both;
    const auto outcome = run_with(GetParam(), std::make_shared<NthRequest>(1, Fault{EINVAL}, 0, direction), folder.path());
    EXPECT_EQ(outcome.error, "");
    EXPECT_NE(outcome.description.find("page cache"), std::string::npos) << outcome.description;
  }
  const auto later = run_with(GetParam(), std::make_shared<NthRequest>(9, Fault{EINVAL}), folder.path());
  EXPECT_NE(later.error.find("EINVAL"), std::string::npos) << later.error;
}

TEST_P(EachPath, ReadsOvertakeWritesThatWait) {
  const TemporaryFolder folder;
  // Writes are slow: 64 of them are waiting when the read comes, which must not wait for all.
  class SlowWrites : public FaultSource {
   public:
    Fault request(bool write, std::int64_t, std::int64_t) override {
      if (write && slow) std::this_thread::sleep_for(std::chrono::milliseconds(4));
      if (write) ++writes;
      return {};
    }
    std::atomic<bool> slow{false};
    std::atomic<int> writes{0};
  };
  const auto faults = std::make_shared<SlowWrites>();
  IoSettings settings{.block_size = 8 << 10, .queue_depth = 2};
  settings.path = GetParam();
  const auto file = SwapFile::create(folder.path(), 2 * kMiB, settings, "rank 0/1", faults);
  const auto out = file->buffer(kMiB), in = file->buffer(8 << 10);
  fill(out.data(), kMiB, 0, 1);
  file->begin_write(0, out.data(), kMiB)->wait();
  faults->slow = true;
  faults->writes = 0;
  const auto write = file->begin_write(kMiB, out.data(), kMiB);
  file->begin_read(8 << 10, in.data(), 8 << 10)->wait();
  EXPECT_LT(faults->writes, 64);
  EXPECT_FALSE(write->done());
  EXPECT_TRUE(holds(in.data(), 8 << 10, 8 << 10, 1));
  write->wait();
}

TEST_P(EachPath, ManyThreadsBeginAndWaitAtOnce) {
  const TemporaryFolder folder;
  IoSettings settings{.block_size = 16 << 10, .queue_depth = 4, .threads = 2};
  settings.path = GetParam();
  const auto file = SwapFile::create(folder.path(), 4 * kMiB, settings, "rank 0/1");
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
  const TemporaryFolder folder;
  for (int round = 0; round < 20; ++round) {
    std::vector<std::shared_ptr<Work>> works;
    IoBuffer out;
    {
      IoSettings settings{.block_size = 4096, .queue_depth = 2};
      settings.path = GetParam();
      const auto file = SwapFile::create(folder.path(), kMiB, settings, "rank 0/1");
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
    static_cast<void>(failed);  // how many is a matter of time
    static_cast<char*>(out.data())[kMiB - 1] = 1;  // the memory outlives the file
  }
}

// The n-th submission to the ring fails so, `more` ones after it, too.
class NthSubmission : public FaultSource {
 public:
  NthSubmission(int n, int error, int more) : n_(n), error_(error), more_(more) {}
  int submission() override {
    const int count = ++count_;
    return count >= n_ && count <= n_ + more_ ? error_ : 0;
  }

 private:
  const int n_, error_, more_;
  std::atomic<int> count_{0};
};

bool ring_works() {
  const TemporaryFolder folder;
  IoSettings settings;
  settings.path = Path::Ring;
  try {
    SwapFile::create(folder.path(), kMiB, settings, "rank 0/1");
    return true;
  } catch (const IoError&) {
    return false;
  }
}

TEST(Ring, WhateverASubmissionReturnsNothingIsLostAndNothingHangs) {
  if (!ring_works()) GTEST_SKIP() << "no io_uring here";
  const TemporaryFolder folder(On::Memory);
  constexpr std::int64_t kSize = 256 << 10;
  for (const int error : {EINTR, EAGAIN, EBUSY, ENOMEM, ENXIO, -1}) {
    for (const int more : {0, 3, 100000}) {
      for (int n = 1; n <= 30; n += more > 3 ? 13 : 1) {
        if (more > 3 && (error == EINTR || error == EBUSY || error == ENOMEM)) continue;  // no signals without end; like EAGAIN
        SCOPED_TRACE(testing::Message() << "submission " << n << " and " << more << " more, errno " << error);
        for (const bool single : {false, true}) {
          IoSettings settings{.block_size = 8 << 10, .queue_depth = 3, .single_submit = single};
          settings.path = Path::Ring;
          const auto file = SwapFile::create(folder.path(), kSize, settings, "rank 0/1",
                                             std::make_shared<NthSubmission>(n, error, more));
          const auto out = file->buffer(kSize), in = file->buffer(kSize);
          fill(out.data(), kSize, 0, static_cast<std::uint64_t>(n));
          file->begin_write(0, out.data(), kSize)->wait();
          std::memset(in.data(), 0, kSize);
          const auto first = file->begin_read(0, in.data(), kSize / 2);
          const auto second = file->begin_read(kSize / 2, static_cast<char*>(in.data()) + kSize / 2, kSize / 2);
          first->wait();
          second->wait();
          ASSERT_TRUE(holds(in.data(), kSize, 0, static_cast<std::uint64_t>(n)));
        }
      }
    }
  }
}

class Refuses : public FaultSource {
 public:
  int ring = 0, memory = 0, unnamed = 0, unlinked = 0, room = 0;
  int ring_setup() override { return ring; }
  int registration() override { return memory; }
  int open_unnamed() override { return unnamed; }
  int unlink() override { return unlinked; }
  int reserve() override { return room; }
};

void expect_round_trip(SwapFile& file) {
  const auto out = file.buffer(kMiB), in = file.buffer(kMiB);
  fill(out.data(), kMiB, 0, 5);
  file.begin_write(0, out.data(), kMiB)->wait();
  file.begin_read(0, in.data(), kMiB)->wait();
  EXPECT_TRUE(holds(in.data(), kMiB, 0, 5));
}

TEST(Description, NamesThePathThatWorks) {
  const TemporaryFolder folder;
  const auto faults = std::make_shared<Refuses>();
  faults->ring = EPERM;
  const auto threads = SwapFile::create(folder.path(), kMiB, {}, "rank 0/1", faults);
  EXPECT_EQ(threads->description().rfind("8 threads, pread/pwrite, ", 0), 0u) << threads->description();
  expect_round_trip(*threads);
  IoSettings only_ring;
  only_ring.path = Path::Ring;
  EXPECT_THROW(SwapFile::create(folder.path(), kMiB, only_ring, "rank 0/1", faults), IoError);
  if (!ring_works()) GTEST_SKIP() << "no io_uring here";
  const auto ring = SwapFile::create(folder.path(), kMiB, {}, "rank 0/1");
  EXPECT_EQ(ring->description().rfind("io_uring, ", 0), 0u) << ring->description();
  EXPECT_NE(ring->description().find(" buffers"), std::string::npos) << ring->description();
  faults->ring = 0;
  faults->memory = ENOMEM;
  const auto plain = SwapFile::create(folder.path(), kMiB, {}, "rank 0/1", faults);
  EXPECT_NE(plain->description().find("plain buffers"), std::string::npos) << plain->description();
  expect_round_trip(*plain);
}

TEST(Description, BuffersAreRegisteredAsFarAsTheLimitOfLockedMemoryGoes) {
  if (!ring_works()) GTEST_SKIP() << "no io_uring here";
  const TemporaryFolder folder;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // An ordinary user, for whom the limit holds.
    const rlimit few{256 << 10, 256 << 10};
    std::filesystem::permissions(folder.path(), fs::perms::all);
    if (setrlimit(RLIMIT_MEMLOCK, &few) != 0 || (geteuid() == 0 && setuid(65534) != 0)) _exit(77);
    try {
      IoSettings settings;
      settings.path = Path::Ring;
      const auto file = SwapFile::create(folder.path(), 2 * kMiB, settings, "rank 0/1");
      const bool before = file->description().find("registered buffers") != std::string::npos;
      expect_round_trip(*file);
      const auto large = file->buffer(8 * kMiB);
      const bool after = file->description().find("registered buffers for ") != std::string::npos;
      _exit(testing::Test::HasFailure() ? 1 : !before ? 78 : after ? 0 : 2);
    } catch (const IoError&) {
      _exit(79);
    }
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) >= 77) GTEST_SKIP() << "an ordinary user gets no ring or no registered memory here: " << WEXITSTATUS(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Reservation, IsMadeBeforeAnythingRunsAndSaysWhatIsMissing) {
  const TemporaryFolder folder;
  const auto free = free_bytes_of(folder.path());
  ASSERT_GT(free, 0);
  const std::int64_t much = (free + (std::int64_t{1} << 40)) / 4096 * 4096;
  for (const int refused : {0, EOPNOTSUPP}) {
    const auto faults = std::make_shared<Refuses>();
    faults->room = refused;
    try {
      SwapFile::create(folder.path(), much, {}, "rank 3/4", faults);
      FAIL() << "reserved " << much << " of " << free;
    } catch (const IoError& error) {
      for (const auto& part : {folder.path(), std::to_string(much), std::string("bytes are free"), std::string("rank 3/4")})
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
  const auto faults = std::make_shared<Refuses>();
  faults->room = EOPNOTSUPP;
  expect_round_trip(*SwapFile::create(folder.path(), kMiB, {}, "rank 0/1", faults));
  EXPECT_THROW(SwapFile::create(folder.path() + "/none", kMiB, {}, "rank 0/1"), IoError);
  EXPECT_THROW(SwapFile::create(folder.path(), kMiB, {.block_size = 1000}, "rank 0/1"), ConfigError);
  EXPECT_THROW(SwapFile::create(folder.path(), kMiB, {.queue_depth = 0}, "rank 0/1"), ConfigError);
}

// In a child, which may mount and lower limits; its words when it fails. 77: cannot be done here.
void in_child(const std::function<int()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int code = 1;
    try {
      code = body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    if (testing::Test::HasFailure()) code = 1;
    std::fflush(nullptr);
    _exit(code);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "not permitted here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_P(EachPath, ARealFullDiskIsSeenAtTheReservationAndNeverAfterIt) {
  const TemporaryFolder folder;
  in_child([&] {
    if (unshare(CLONE_NEWNS) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("none", folder.path().c_str(), "tmpfs", 0, "size=8m") != 0)
      return 77;
    IoSettings settings{.block_size = 64 << 10};
    settings.path = GetParam();
    EXPECT_NE(folder_notice(folder.path()).find("memory"), std::string::npos);
    try {
      SwapFile::create(folder.path(), 9 * kMiB, settings, "rank 0/1");
      ADD_FAILURE() << "9 MiB in 8";
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find("ENOSPC"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(std::to_string(9 * kMiB)), std::string::npos) << error.what();
    }
    const auto faults = std::make_shared<NthRequest>(40, Fault{EIO}, 0, Direction::Writes);
    const auto file = SwapFile::create(folder.path(), 6 * kMiB, settings, "rank 0/1", faults);
    {
      std::ofstream other(folder.path() + "/other");
      other << std::string(4 << 20, 'x') << std::flush;
      EXPECT_FALSE(other.good());
    }
    const auto out = file->buffer(kMiB), in = file->buffer(kMiB);
    fill(out.data(), kMiB, 0, 1);
    file->begin_write(kMiB, out.data(), kMiB)->wait();
    file->begin_read(kMiB, in.data(), kMiB)->wait();
    EXPECT_TRUE(holds(in.data(), kMiB, 0, 1));
    // A write that fails has nowhere else to go now.
    try {
      for (int i = 0; i < 4; ++i) file->begin_write(i * kMiB, out.data(), kMiB)->wait();
      ADD_FAILURE() << "no error";
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find("no second file"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("ENOSPC"), std::string::npos) << error.what();
    }
    return 0;
  });
}

TEST_P(EachPath, ARealLimitOfFileSizesIsAnErrorAndNoSignal) {
  const TemporaryFolder folder;
  in_child([&] {
    IoSettings settings{.block_size = 256 << 10};
    settings.path = GetParam();
    const auto file = SwapFile::create(folder.path(), 4 * kMiB, settings, "rank 0/1");
    const auto out = file->buffer(4 * kMiB);
    fill(out.data(), 4 * kMiB, 0, 1);
    file->begin_write(0, out.data(), 4 * kMiB)->wait();
    // In the middle of a request: it comes back short first, then with EFBIG.
    const rlimit limit{static_cast<rlim_t>(2 * kMiB + (128 << 10)), RLIM_INFINITY};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 77;
    file->begin_write(0, out.data(), 2 * kMiB)->wait();
    try {
      file->begin_write(0, out.data(), 4 * kMiB)->wait();
      ADD_FAILURE() << "no error";
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find("EFBIG"), std::string::npos) << error.what();
    }
    try {
      SwapFile::create(folder.path(), 4 * kMiB, settings, "rank 0/1");
      ADD_FAILURE() << "no error";
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find("EFBIG"), std::string::npos) << error.what();
    }
    return 0;
  });
}

TEST(PrivateFolder, IsUsedWhereFilesNeedNamesAndGoesWithTheFile) {
  const TemporaryFolder folder;
  const auto faults = std::make_shared<Refuses>();
  faults->unnamed = EOPNOTSUPP;
  {
    // Unlinked right away: nothing is there even while it is used.
    const auto file = SwapFile::create(folder.path(), kMiB, {}, "rank 0/1", faults);
    EXPECT_TRUE(fs::is_empty(folder.path()));
    expect_round_trip(*file);
  }
  faults->unlinked = EBUSY;
  setenv("ZERO_RUN_ID", "run/7 x", 1);
  {
    const auto one = SwapFile::create(folder.path(), kMiB, {}, "rank 0/2", faults);
    const auto two = SwapFile::create(folder.path(), kMiB, {}, "rank 1/2", faults);
    unsetenv("ZERO_RUN_ID");
    EXPECT_NE(one->path(), two->path());
    EXPECT_NE(one->path().find("run_7_x"), std::string::npos) << one->path();
    EXPECT_TRUE(fs::exists(one->path()));
    expect_round_trip(*one);
    const auto found = find_leftovers(folder.path(), true);
    ASSERT_EQ(found.size(), 2u);
    for (const auto& one_found : found) {
      EXPECT_FALSE(one_found.removed);
      EXPECT_NE(one_found.kept_because.find("lives"), std::string::npos) << one_found.kept_because;
    }
    expect_round_trip(*two);
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(PrivateFolder, OfADeadRunIsRemovedAndNothingElse) {
  const TemporaryFolder folder;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto faults = std::make_shared<Refuses>();
    faults->unnamed = EOPNOTSUPP;
    faults->unlinked = EBUSY;
    const auto file = SwapFile::create(folder.path(), kMiB, {}, "rank 0/1", faults);
    expect_round_trip(*file);
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  const auto dead = find_leftovers(folder.path(), false);
  ASSERT_EQ(dead.size(), 1u);
  EXPECT_TRUE(dead[0].kept_because.empty());
  EXPECT_GE(dead[0].bytes, kMiB);
  // What only looks like one.
  const auto name = fs::path(dead[0].path).filename().string();
  const auto host_end = name.find('@', 10);
  const auto elsewhere = "zero-swap@another-host" + name.substr(host_end);
  fs::create_directory(folder.path() + "/zero-swap@x");
  fs::create_directory(folder.path() + "/zero-swap");
  fs::create_directory(folder.path() + "/" + elsewhere);
  std::ofstream(folder.path() + "/" + name + "x") << "a file";
  fs::create_directory_symlink("/tmp", folder.path() + "/" + name + "1");
  auto foreign = name;
  foreign.replace(foreign.rfind('@') + 1, std::string::npos, "77");
  fs::create_directory(folder.path() + "/" + foreign);
  std::ofstream(folder.path() + "/" + foreign + "/somebody's") << "work";
  const auto found = find_leftovers(folder.path(), true);
  int removed = 0;
  for (const auto& one : found) {
    removed += one.removed;
    EXPECT_EQ(one.removed, fs::path(one.path).filename().string() == name) << one.path;
    EXPECT_EQ(one.removed, one.kept_because.empty()) << one.path;
  }
  EXPECT_EQ(removed, 1);
  EXPECT_FALSE(fs::exists(dead[0].path));
  EXPECT_TRUE(fs::exists(folder.path() + "/" + foreign + "/somebody's"));
  EXPECT_TRUE(fs::exists(folder.path() + "/" + elsewhere));
  EXPECT_THROW(find_leftovers(folder.path() + "/none", true), IoError);
}

TEST(Buffers, AreUsedAgain) {
  const TemporaryFolder folder;
  const auto file = SwapFile::create(folder.path(), kMiB, {}, "rank 0/1");
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
  const TemporaryFolder folder;
  const auto file = SwapFile::create(folder.path(), kMiB, {}, "rank 0/1");
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
  const TemporaryFolder folder;
  const auto count = [](const char* what) {
    return std::distance(fs::directory_iterator(std::string("/proc/self/") + what), fs::directory_iterator());
  };
  const auto cycle = [&] { expect_round_trip(*SwapFile::create(folder.path(), kMiB, {}, "rank 0/1")); };
  cycle();
  const auto descriptors = count("fd"), tasks = count("task");
  for (int i = 0; i < 50; ++i) cycle();
  EXPECT_EQ(count("fd"), descriptors);
  EXPECT_EQ(count("task"), tasks);
}

}  // namespace
