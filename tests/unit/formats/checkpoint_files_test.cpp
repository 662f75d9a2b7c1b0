// Files of checkpoints: reads past the page cache, whatever the file's size; how much of a file that is written stays
// in the page cache; files that are linked.
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <random>

#include <zero/log.h>

#include "formats/stream_writer.h"
#include "support/file_text.h"
#include "unit/formats/every_call.h"

namespace zero::test::checkpoint_files_test {
namespace {
using namespace zero::formats;

std::string random_bytes(std::size_t size) {
  std::mt19937 random(static_cast<unsigned>(size));
  std::string bytes(size, '\0');
  for (auto& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// Shortens every read.
struct ShortReads : FsOps {
  ssize_t pread(int fd, void* out, std::size_t bytes, std::uint64_t offset) override {
    return FsOps::pread(fd, out, std::min<std::size_t>(bytes, 6000), offset);
  }
};

TEST(CheckpointFiles, DirectReadsEndWithTheFile) {
  ShortReads short_reads;
  for (auto* const fs : {&system_files(), static_cast<FsOps*>(&short_reads)})
    for (const auto on : {TempFolder::On::Disk, TempFolder::On::Memory}) {
      TempFolder folder(on);
      const auto in = Folder::open(*fs, folder.text());
      for (const std::size_t size : {1, 4095, 4096, 4097, 3 * 4096 + 100, (1 << 20) + 1}) {
        const auto bytes = random_bytes(size);
        const auto name = "f" + std::to_string(size);
        in.write_file(name, bytes);
        const auto file = in.open_file(name);
        constexpr char kUntouched = 0x5a;
        const auto room = (size + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
        auto memory = aligned_memory(room);
        std::memset(memory.get(), kUntouched, room);
        const auto before = bytes_moved().load();
        file.read_direct(memory, size, 0);
        EXPECT_EQ(std::memcmp(memory.get(), bytes.data(), size), 0) << size;
        EXPECT_EQ(bytes_moved() - before, size);
        file.read_direct(memory, size / 2, 0);  // less than the page has
        EXPECT_EQ(bytes_moved() - before, size + size / 2);
        // Afterwards, a place that is no multiple of anything.
        char one = 0;
        file.read(&one, 1, size - 1);
        EXPECT_EQ(one, bytes.back());
        auto more = aligned_memory(room + kDirectAlignment);
        std::string text;
        EXPECT_EQ(code_of([&] { file.read_direct(more, size + 1, 0); }, &text), kDamaged) << size;
        EXPECT_NE(text.find("ends at offset " + std::to_string(size)), std::string::npos) << text;
      }
    }
}

// A file system of its own, which refuses direct transfers: when they are switched on, or each of them.
struct NoDirect : FsOps {
  NoDirect(std::uint64_t number, bool at_once) : device(number), refuses_at_once(at_once) {}
  const std::uint64_t device;
  const bool refuses_at_once;
  std::atomic<bool> direct{false};
  std::atomic<int> refused{0};
  int set_direct(int, bool wanted) override {
    direct = wanted && !refuses_at_once;
    refused += wanted && refuses_at_once;
    return wanted && refuses_at_once ? -EINVAL : 0;
  }
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, std::uint64_t offset) override {
    if (!direct) return FsOps::pwrite(fd, data, bytes, offset);
    ++refused;
    return -EINVAL;
  }
  int info(int fd, FileInfo* out) override {
    const int result = FsOps::info(fd, out);
    out->device = device;
    return result;
  }
};

TEST(CheckpointFiles, AFileSystemWithoutDirectTransfersIsNamedOnce) {
  std::vector<std::string> told;
  std::mutex mutex;
  set_log_sink([&](LogLevel level, std::string_view text) {
    const std::lock_guard lock(mutex);
    if (level == LogLevel::Info) told.emplace_back(text);
  });
  TempFolder folder;
  const std::string bytes(std::size_t{9} << 20, 'x');
  for (const auto& [device, at_once] : {std::pair{900001, true}, {900002, false}}) {
    NoDirect fs(static_cast<std::uint64_t>(device), at_once);
    const auto out = Folder::open(fs, folder.text());
    for (const auto* const name : {"a", "b"}) {
      const auto file_name = name + std::to_string(device);
      auto file = out.create(file_name);
      StreamWriter writer(file, 0);
      for (std::size_t at = 0; at < bytes.size();) {
        auto some = bytes.size() - at;
        auto* const to = writer.room(some);
        std::memcpy(to, bytes.data() + at, some);
        writer.advance(some);
        at += some;
      }
      writer.finish();
      file.close();
      EXPECT_EQ(file_text(folder.path() / file_name), bytes);
    }
    EXPECT_GE(fs.refused.load(), 2);
  }
  set_log_sink(nullptr);
  ASSERT_EQ(told.size(), 2U);
  for (const int i : {0, 1})
    EXPECT_EQ(told[static_cast<std::size_t>(i)],
              "[checkpoint] " + folder.file("a" + std::to_string(900001 + i)) +
                  ": files of this file system are read and written through the page cache: it refuses direct "
                  "transfers: Invalid argument");
}

// Counts what is written between calls of write_back(), which fail if asked to.
struct Watching : FsOps {
  std::uint64_t unwritten = 0, most = 0;
  int calls = 0, error = 0;
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, std::uint64_t offset) override {
    unwritten += bytes;
    most = std::max(most, unwritten);
    return FsOps::pwrite(fd, data, bytes, offset);
  }
  int write_back(int fd) override {
    ++calls;
    unwritten = 0;
    return error != 0 ? -error : FsOps::write_back(fd);
  }
};

TEST(CheckpointFiles, LittleStaysInThePageCache) {
  constexpr std::size_t kBytes = std::size_t{4} << 20, kTimes = 25;
  const std::string data(kBytes, 'x');
  TempFolder folder;
  const auto write = [&](Watching& fs, const char* name) {
    const auto in = Folder::open(fs, folder.text());
    auto file = in.create(name);
    for (std::size_t i = 0; i < kTimes; ++i) file.write(data.data(), kBytes, i * kBytes);
    file.sync();
  };
  Watching good;
  write(good, "good");
  EXPECT_EQ(good.calls, 3) << "100 MiB";
  EXPECT_LE(good.most, std::uint64_t{36} << 20);
  // The kernel reports an error of the disk once, so it must not be lost here.
  Watching failing;
  failing.error = EIO;
  std::string text;
  EXPECT_EQ(code_of([&] { write(failing, "failing"); }, &text), static_cast<int>(ExitCode::kIo));
  EXPECT_NE(text.find("Input/output error"), std::string::npos) << text;
  // A file system that has no such call.
  Watching without;
  without.error = EINVAL;
  write(without, "without");
  EXPECT_EQ(without.calls, 3);
}

// --- frozen parameters that a checkpoint before has -----------------------------------------------

const std::vector<float> kFrozen(5000, 1.5F);

std::vector<Source> frozen_parameters() { return {{"param", "w", "F32", {5000}, false, 0, 5000, from(kFrozen), true}}; }

// link_at() fails, unless error is 0.
struct WithoutLinks : FsOps {
  int error = 0, asked = 0;
  int link_at(int from_folder, const char* from, int folder, const char* name) override {
    ++asked;
    return error != 0 ? -error : FsOps::link_at(from_folder, from, folder, name);
  }
};

TEST(CheckpointFiles, WhereNoLinkCanBeMadeTheFileIsWritten) {
  for (const int error : {0, EXDEV, EPERM, EMLINK, EOPNOTSUPP, EIO}) {
    const TempFolder folder(TempFolder::On::Memory);
    WithoutLinks files;
    files.error = error;
    const auto before = Folder::make(files, folder.file("before")), after = Folder::make(files, folder.file("after"));
    const auto name = frozen_file_name(0);
    const auto first = write_rank_file(before, name, frozen_parameters());
    const Previous previous{&before, first.file};
    const auto second = link_or_write_rank_file(after, name, frozen_parameters(), &previous);
    EXPECT_EQ(files.asked, 1);
    EXPECT_EQ(std::filesystem::hard_link_count(after.path_of(name)), error == 0 ? 2u : 1u) << error;
    EXPECT_TRUE(second.file.hash == first.file.hash && second.rows == first.rows) << error;
    EXPECT_EQ(file_text(after.path_of(name)), file_text(before.path_of(name))) << error;
  }
}

TEST(CheckpointFiles, AFaultWhileLinkingLeavesTheFileBefore) {
  const auto name = frozen_file_name(0);
  const auto written = [&](FsOps& fs, const TempFolder& folder, const char* to) {
    return write_rank_file(Folder::make(fs, folder.file(to)), name, frozen_parameters()).file;
  };
  const TempFolder undisturbed(TempFolder::On::Memory);
  const auto wanted = written(system_files(), undisturbed, "before");
  for (const auto fault : {FaultyFiles::Fault::DieBefore, FaultyFiles::Fault::DieAfter, FaultyFiles::Fault::Error}) {
    const int calls = strike_every_call(
        fault, EIO, [&](const TempFolder& folder) { (void)written(system_files(), folder, "before"); },
        [&](FaultyFiles& files, const TempFolder& folder, int) {
          const auto before = Folder::open(files, folder.file("before"));
          const Previous previous{&before, wanted};
          (void)link_or_write_rank_file(Folder::make(files, folder.file("after")), name, frozen_parameters(),
                                        &previous);
        },
        [&](const TempFolder& folder, const std::string& label) {
          const auto before = Folder::open(system_files(), folder.file("before"));
          EXPECT_EQ(code_of([&] { (void)require_hash(before, wanted); }), 0) << label;
        });
    EXPECT_GT(calls, 5);
  }
}

}  // namespace
}  // namespace zero::test::checkpoint_files_test
