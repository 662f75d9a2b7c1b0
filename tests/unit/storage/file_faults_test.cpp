// A swap file whose requests are short, interrupted, refused or failed: each request in turn, over both paths.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <zero/errors.h>

#include "storage/fault_source.h"
#include "storage/swap_file.h"
#include "unit/storage/file_samples.h"

namespace zero::storage::file_faults_test {
namespace {

using namespace test;
namespace fs = std::filesystem;
using Path = IoSettings::Path;
using On = TempFolder::On;

class FileFaults : public testing::TestWithParam<Path> {};
INSTANTIATE_TEST_SUITE_P(SwapFile, FileFaults, testing::Values(Path::Ring, Path::Threads),
                         [](const auto& info) { return info.param == Path::Ring ? "Ring" : "Threads"; });

struct Outcome {
  int hits = 0;
  std::string error;  // of create, or of the first transfer that failed
  bool created = false;
  std::int64_t retries = 0;
  std::string description;
};

// Writes eight tiles, reads them, and overwrites half of them while the rest is read. Checks the
// data of all transfers that did not fail.
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
    const auto at = [](const IoBuffer& buffer, std::int64_t tile) {
      return static_cast<char*>(buffer.data()) + tile * kTile;
    };
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

TEST_P(FileFaults, AShortInterruptedOrRefusedRequestIsSentAgain) {
  const TempFolder disk, memory(On::Memory);
  for (const Fault fault : {Fault{0, 4096}, Fault{0, 5000}, Fault{0, 100}, Fault{EINTR}, Fault{EAGAIN}}) {
    for (int n = 1; n <= kMostRequests; ++n) {
      // The alignment of the remainder matters only on a disk.
      const auto& folder = fault.at_most == 5000 && n % 5 == 0 ? disk : memory;
      SCOPED_TRACE(testing::Message() << "request " << n << ", errno " << fault.error << ", at most " << fault.at_most);
      const auto outcome = run_with(GetParam(), std::make_shared<NthRequest>(n, fault), folder.text());
      EXPECT_EQ(outcome.error, "");
      EXPECT_EQ(outcome.hits, 1);
      EXPECT_EQ(outcome.retries, n <= 3 ? 0 : 1);
    }
  }
}

TEST_P(FileFaults, AFullDiskAtAnyRequestIsAnErrorThatSaysWhereAndHowMuch) {
  const TempFolder folder(On::Memory);
  for (const int error : {ENOSPC, EDQUOT, EFBIG}) {
    for (int n = 1; n <= kMostRequests / 3; ++n) {
      SCOPED_TRACE(testing::Message() << "write " << n << ", errno " << error);
      const auto faults = std::make_shared<NthRequest>(n, Fault{error}, 0, Direction::Writes);
      const auto outcome = run_with(GetParam(), faults, folder.text());
      ASSERT_EQ(outcome.hits, 1);
      for (const auto& part :
           {std::string("SwapFile::write"), folder.text(), "offset " + std::to_string(faults->offset()),
            std::string(strerrorname_np(error)), std::string("rank 2/4"), std::string("bytes are free")})
        EXPECT_NE(outcome.error.find(part), std::string::npos) << part << " is not in: " << outcome.error;
    }
  }
}

TEST_P(FileFaults, AFailedReadIsAnErrorWithoutARetry) {
  const TempFolder folder(On::Memory);
  for (int n = 1; n <= kMostRequests / 2; ++n) {
    SCOPED_TRACE(testing::Message() << "read " << n);
    const auto faults = std::make_shared<NthRequest>(n, Fault{EIO}, 0, Direction::Reads);
    const auto outcome = run_with(GetParam(), faults, folder.text());
    ASSERT_EQ(outcome.hits, 1);
    EXPECT_EQ(outcome.retries, 0);
    for (const auto& part : {std::string("SwapFile::read"), folder.text(), "offset " + std::to_string(faults->offset()),
                             std::string("EIO"), std::string("checkpoint")})
      EXPECT_NE(outcome.error.find(part), std::string::npos) << part << " is not in: " << outcome.error;
  }
}

TEST_P(FileFaults, AFailedWriteGoesToASecondFileAndStaysThere) {
  const TempFolder folder(On::Memory);
  for (const int error : {EIO, EROFS, ENODEV}) {
    for (int n = 3; n <= kMostRequests / 2; ++n) {
      SCOPED_TRACE(testing::Message() << "write " << n << ", errno " << error);
      const auto outcome =
          run_with(GetParam(), std::make_shared<NthRequest>(n, Fault{error}, 0, Direction::Writes), folder.text());
      EXPECT_EQ(outcome.error, "");
      EXPECT_EQ(outcome.hits, 1);
      EXPECT_EQ(outcome.retries, 1);
    }
  }
  // Many in a row: each failed range gets a new location, which is then read and written.
  const auto many =
      run_with(GetParam(), std::make_shared<NthRequest>(5, Fault{EIO}, 0, Direction::Writes), folder.text());
  EXPECT_EQ(many.error, "");
}

TEST_P(FileFaults, AWriteThatFailsHalfwayGoesWholeToTheSecondFile) {
  const TempFolder folder;
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
  const auto file = SwapFile::create(folder.text(), kSize, settings, "rank 0/1", faults);
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

TEST_P(FileFaults, RangesThatWereMovedAreReadAndWrittenInAnyPieces) {
  const TempFolder folder;
  constexpr std::int64_t kSize = 1 << 20;
  IoSettings settings{.block_size = 32 << 10, .queue_depth = 4};
  settings.path = GetParam();
  // The second file begins at offset 0, too: only places in the first one beyond its length are bad.
  const auto faults = std::make_shared<BadRange>(600 << 10, 700 << 10);
  const auto file = SwapFile::create(folder.text(), kSize, settings, "rank 0/1", faults);
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

TEST_P(FileFaults, AWriteThatFailsInTheSecondFileTooIsAnError) {
  const TempFolder folder(On::Memory);
  const auto outcome =
      run_with(GetParam(), std::make_shared<NthRequest>(2, Fault{EIO}, 1000, Direction::Writes), folder.text());
  EXPECT_NE(outcome.error.find("second file"), std::string::npos) << outcome.error;
}

TEST_P(FileFaults, EndlessRefusalsAndEmptyResultsEnd) {
  const TempFolder folder(On::Memory);
  for (const auto direction : {Direction::Reads, Direction::Writes}) {
    const bool reads = direction == Direction::Reads;
    const auto none = run_with(GetParam(), std::make_shared<NthRequest>(2, Fault{0, 0}, 0, direction), folder.text());
    EXPECT_NE(none.error.find(reads ? "the file's end" : "ENOSPC"), std::string::npos) << none.error;
    const auto little =
        run_with(GetParam(), std::make_shared<NthRequest>(2, Fault{0, 100}, 100000, direction), folder.text());
    EXPECT_NE(little.error.find("twice in a row"), std::string::npos) << little.error;
  }
}

TEST_P(FileFaults, RefusalsOfOneRequestEndAfterAWhile) {
  const TempFolder folder(On::Memory);
  // One request alone is refused 150 times: the ring gives it to a plain call, threads report it.
  const auto faults =
      std::make_shared<NthRequest>(4, Fault{EAGAIN}, GetParam() == Path::Ring ? 149 : 99, Direction::Writes);
  IoSettings settings{.block_size = 8 << 10, .queue_depth = 1};
  settings.path = GetParam();
  const auto file = SwapFile::create(folder.text(), kMiB, settings, "rank 0/1", faults);
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
  // Later requests use the normal path again.
  file->begin_write(0, out.data(), 8 << 10)->wait();
  file->begin_read(0, in.data(), 8 << 10)->wait();
  EXPECT_TRUE(holds(in.data(), 8 << 10, 0, 3));
}

TEST_P(FileFaults, WithoutDirectTransfersThePageCacheIsUsedAndNamed) {
  const TempFolder folder;
  for (int n = 1; n <= 2; ++n) {
    const auto direction = n == 1 ? Direction::Writes : Direction::Both;
    const auto outcome =
        run_with(GetParam(), std::make_shared<NthRequest>(1, Fault{EINVAL}, 0, direction), folder.text());
    EXPECT_EQ(outcome.error, "");
    EXPECT_NE(outcome.description.find("page cache"), std::string::npos) << outcome.description;
  }
  const auto later = run_with(GetParam(), std::make_shared<NthRequest>(9, Fault{EINVAL}), folder.text());
  EXPECT_NE(later.error.find("EINVAL"), std::string::npos) << later.error;
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

TEST(Ring, WhateverASubmissionReturnsNothingIsLostAndNothingHangs) {
  if (!ring_works()) GTEST_SKIP() << "no io_uring here";
  const TempFolder folder(On::Memory);
  constexpr std::int64_t kSize = 256 << 10;
  for (const int error : {EINTR, EAGAIN, EBUSY, ENOMEM, ENXIO, -1}) {
    for (const int more : {0, 3, 100000}) {
      for (int n = 1; n <= 30; n += more > 3 ? 13 : 1) {
        if (more > 3 && (error == EINTR || error == EBUSY || error == ENOMEM))
          continue;  // no signals without end; like EAGAIN
        SCOPED_TRACE(testing::Message() << "submission " << n << " and " << more << " more, errno " << error);
        for (const bool single : {false, true}) {
          IoSettings settings{.block_size = 8 << 10, .queue_depth = 3, .single_submit = single};
          settings.path = Path::Ring;
          const auto file = SwapFile::create(folder.text(), kSize, settings, "rank 0/1",
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

}  // namespace
}  // namespace zero::storage::file_faults_test
