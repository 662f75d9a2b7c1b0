// A swap file over both paths: data, overlap, every result that a request may have, full disks and
// limits, private folders and what is left of them.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <zero/errors.h>

#include "offload/swap_file.h"

namespace {

using namespace zero;
using namespace zero::offload;
namespace fs = std::filesystem;
using Path = IoSettings::Path;

constexpr std::int64_t kMiB = 1 << 20;

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (fs::path(ZERO_BINARY_DIR) / "file_io_XXXXXX").string();
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

}  // namespace
