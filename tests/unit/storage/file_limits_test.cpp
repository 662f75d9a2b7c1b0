// A swap file under system limits: full disks, sizes, locked memory, folders without unnamed files, leftovers of dead
// runs.
#include <gtest/gtest.h>

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>

#include <zero/errors.h>

#include "storage/fault_source.h"
#include "storage/leftovers.h"
#include "storage/storage_file.h"
#include "storage/swap_file.h"
#include "unit/storage/file_samples.h"

namespace zero::storage::file_limits_test {
namespace {

using namespace test;
namespace fs = std::filesystem;
using Path = IoSettings::Path;
using On = TempFolder::On;

class FileLimits : public testing::TestWithParam<Path> {};
INSTANTIATE_TEST_SUITE_P(SwapFile, FileLimits, testing::Values(Path::Ring, Path::Threads),
                         [](const auto& info) { return info.param == Path::Ring ? "Ring" : "Threads"; });

class Refuses : public FaultSource {
 public:
  int ring = 0, memory = 0, unnamed = 0, unlinked = 0, room = 0;
  int ring_setup() override { return ring; }
  int registration() override { return memory; }
  int open_unnamed() override { return unnamed; }
  int unlink() override { return unlinked; }
  int reserve() override { return room; }
};

TEST(Description, NamesThePathThatWorks) {
  const TempFolder folder;
  const auto faults = std::make_shared<Refuses>();
  faults->ring = EPERM;
  const auto threads = SwapFile::create(folder.text(), kMiB, {}, "rank 0/1", faults);
  EXPECT_EQ(threads->description().rfind("8 threads, pread/pwrite, ", 0), 0u) << threads->description();
  expect_round_trip(*threads);
  IoSettings only_ring;
  only_ring.path = Path::Ring;
  EXPECT_THROW(SwapFile::create(folder.text(), kMiB, only_ring, "rank 0/1", faults), IoError);
  if (!ring_works()) GTEST_SKIP() << "no io_uring here";
  const auto ring = SwapFile::create(folder.text(), kMiB, {}, "rank 0/1");
  EXPECT_EQ(ring->description().rfind("io_uring, ", 0), 0u) << ring->description();
  EXPECT_NE(ring->description().find(" buffers"), std::string::npos) << ring->description();
  faults->ring = 0;
  faults->memory = ENOMEM;
  const auto plain = SwapFile::create(folder.text(), kMiB, {}, "rank 0/1", faults);
  EXPECT_NE(plain->description().find("plain buffers"), std::string::npos) << plain->description();
  expect_round_trip(*plain);
}

TEST(Description, BuffersAreRegisteredAsFarAsTheLimitOfLockedMemoryGoes) {
  if (!ring_works()) GTEST_SKIP() << "no io_uring here";
  const TempFolder folder;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // An ordinary user, for whom the limit holds.
    const rlimit few{256 << 10, 256 << 10};
    std::filesystem::permissions(folder.text(), fs::perms::all);
    if (setrlimit(RLIMIT_MEMLOCK, &few) != 0 || (geteuid() == 0 && setuid(65534) != 0)) _exit(77);
    try {
      IoSettings settings;
      settings.path = Path::Ring;
      const auto file = SwapFile::create(folder.text(), 2 * kMiB, settings, "rank 0/1");
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
  if (WEXITSTATUS(status) >= 77)
    GTEST_SKIP() << "an ordinary user gets no ring or no registered memory here: " << WEXITSTATUS(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Reservation, IsMadeBeforeAnythingRunsAndSaysWhatIsMissing) {
  const TempFolder folder;
  const auto free = free_bytes_of(folder.text());
  ASSERT_GT(free, 0);
  const std::int64_t much = (free + (std::int64_t{1} << 40)) / 4096 * 4096;
  for (const int refused : {0, EOPNOTSUPP}) {
    const auto faults = std::make_shared<Refuses>();
    faults->room = refused;
    try {
      SwapFile::create(folder.text(), much, {}, "rank 3/4", faults);
      FAIL() << "reserved " << much << " of " << free;
    } catch (const IoError& error) {
      for (const auto& part :
           {folder.text(), std::to_string(much), std::string("bytes are free"), std::string("rank 3/4")})
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
  const auto faults = std::make_shared<Refuses>();
  faults->room = EOPNOTSUPP;
  expect_round_trip(*SwapFile::create(folder.text(), kMiB, {}, "rank 0/1", faults));
  EXPECT_THROW(SwapFile::create(folder.text() + "/none", kMiB, {}, "rank 0/1"), IoError);
  EXPECT_THROW(SwapFile::create(folder.text(), kMiB, {.block_size = 1000}, "rank 0/1"), ConfigError);
  EXPECT_THROW(SwapFile::create(folder.text(), kMiB, {.queue_depth = 0}, "rank 0/1"), ConfigError);
}

// Runs in a child, which may mount and lower limits; returns its error text. 77: not possible here.
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

TEST_P(FileLimits, ARealFullDiskIsSeenAtTheReservationAndNeverAfterIt) {
  const TempFolder folder;
  in_child([&] {
    if (unshare(CLONE_NEWNS) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("none", folder.text().c_str(), "tmpfs", 0, "size=8m") != 0)
      return 77;
    IoSettings settings{.block_size = 64 << 10};
    settings.path = GetParam();
    EXPECT_NE(folder_notice(folder.text()).find("memory"), std::string::npos);
    try {
      SwapFile::create(folder.text(), 9 * kMiB, settings, "rank 0/1");
      ADD_FAILURE() << "9 MiB in 8";
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find("ENOSPC"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(std::to_string(9 * kMiB)), std::string::npos) << error.what();
    }
    const auto faults = std::make_shared<NthRequest>(40, Fault{EIO}, 0, Direction::Writes);
    const auto file = SwapFile::create(folder.text(), 6 * kMiB, settings, "rank 0/1", faults);
    {
      std::ofstream other(folder.text() + "/other");
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

TEST_P(FileLimits, ARealLimitOfFileSizesIsAnErrorAndNoSignal) {
  const TempFolder folder;
  in_child([&] {
    IoSettings settings{.block_size = 256 << 10};
    settings.path = GetParam();
    const auto file = SwapFile::create(folder.text(), 4 * kMiB, settings, "rank 0/1");
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
      SwapFile::create(folder.text(), 4 * kMiB, settings, "rank 0/1");
      ADD_FAILURE() << "no error";
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find("EFBIG"), std::string::npos) << error.what();
    }
    return 0;
  });
}

TEST(PrivateFolder, IsUsedWhereFilesNeedNamesAndGoesWithTheFile) {
  const TempFolder folder;
  const auto faults = std::make_shared<Refuses>();
  faults->unnamed = EOPNOTSUPP;
  {
    // Unlinked right away: nothing is there even while it is used.
    const auto file = SwapFile::create(folder.text(), kMiB, {}, "rank 0/1", faults);
    EXPECT_TRUE(fs::is_empty(folder.text()));
    expect_round_trip(*file);
  }
  faults->unlinked = EBUSY;
  setenv("ZERO_RUN_ID", "run/7 x", 1);
  {
    const auto one = SwapFile::create(folder.text(), kMiB, {}, "rank 0/2", faults);
    const auto two = SwapFile::create(folder.text(), kMiB, {}, "rank 1/2", faults);
    unsetenv("ZERO_RUN_ID");
    EXPECT_NE(one->path(), two->path());
    EXPECT_NE(one->path().find("run_7_x"), std::string::npos) << one->path();
    EXPECT_TRUE(fs::exists(one->path()));
    expect_round_trip(*one);
    const auto found = find_leftovers(folder.text(), true);
    ASSERT_EQ(found.size(), 2u);
    for (const auto& one_found : found) {
      EXPECT_FALSE(one_found.removed);
      EXPECT_NE(one_found.kept_because.find("lives"), std::string::npos) << one_found.kept_because;
    }
    expect_round_trip(*two);
  }
  EXPECT_TRUE(fs::is_empty(folder.text()));
}

TEST(PrivateFolder, OfADeadRunIsRemovedAndNothingElse) {
  const TempFolder folder;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto faults = std::make_shared<Refuses>();
    faults->unnamed = EOPNOTSUPP;
    faults->unlinked = EBUSY;
    const auto file = SwapFile::create(folder.text(), kMiB, {}, "rank 0/1", faults);
    expect_round_trip(*file);
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  const auto dead = find_leftovers(folder.text(), false);
  ASSERT_EQ(dead.size(), 1u);
  EXPECT_TRUE(dead[0].kept_because.empty());
  EXPECT_GE(dead[0].bytes, kMiB);
  // What only looks like one.
  const auto name = fs::path(dead[0].path).filename().string();
  const auto host_end = name.find('@', 10);
  const auto elsewhere = "zero-swap@another-host" + name.substr(host_end);
  fs::create_directory(folder.text() + "/zero-swap@x");
  fs::create_directory(folder.text() + "/zero-swap");
  fs::create_directory(folder.text() + "/" + elsewhere);
  std::ofstream(folder.text() + "/" + name + "x") << "a file";
  fs::create_directory_symlink("/tmp", folder.text() + "/" + name + "1");
  auto foreign = name;
  foreign.replace(foreign.rfind('@') + 1, std::string::npos, "77");
  fs::create_directory(folder.text() + "/" + foreign);
  std::ofstream(folder.text() + "/" + foreign + "/somebody's") << "work";
  const auto found = find_leftovers(folder.text(), true);
  int removed = 0;
  for (const auto& one : found) {
    removed += one.removed;
    EXPECT_EQ(one.removed, fs::path(one.path).filename().string() == name) << one.path;
    EXPECT_EQ(one.removed, one.kept_because.empty()) << one.path;
  }
  EXPECT_EQ(removed, 1);
  EXPECT_FALSE(fs::exists(dead[0].path));
  EXPECT_TRUE(fs::exists(folder.text() + "/" + foreign + "/somebody's"));
  EXPECT_TRUE(fs::exists(folder.text() + "/" + elsewhere));
  EXPECT_THROW(find_leftovers(folder.text() + "/none", true), IoError);
}

}  // namespace
}  // namespace zero::storage::file_limits_test
