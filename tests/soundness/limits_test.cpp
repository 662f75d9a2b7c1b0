// System limits that affect shared memory: core files, file sizes, descriptors, memory that must not be executable.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include <zero/errors.h>

#include "comm/group.h"
#include "comm/shm/arena.h"
#include "comm/symmetric_buffer.h"
#include "support/folder.h"
#include "support/shm_ranks.h"

namespace zero::test::limits_test {
namespace {

// Lines of /proc/self/smaps that name a mapping of an arena without "dd" (not in core files), and how many have it.
std::string dumped_arenas(int* left_out) {
  std::ifstream in("/proc/self/smaps");
  std::string line, arena, dumped;
  *left_out = 0;
  while (std::getline(in, line)) {
    if (line.find(":zero-arena") != std::string::npos) arena = line;
    if (line.rfind("VmFlags:", 0) != 0) continue;
    if (!arena.empty()) (line.find(" dd") != std::string::npos ? void(++*left_out) : void(dumped += arena + "\n"));
    arena.clear();
  }
  return dumped;
}

// A rank maps every rank's arena, as large as the memory of the machine, and a core file would have all of it.
TEST(Limits, CoreFilesLeaveSharedMemoryOut) {
  const auto ends = with_ranks(2, [](const Comm& comm) {
    const auto vector = comm::group_of(*comm)->share(1 << 20, at::kFloat);
    vector->publish();
    comm::group_of(*comm)->gather(*vector);
    int left_out = 0;
    const auto dumped = dumped_arenas(&left_out);
    require(dumped.empty(), "in core files: " + dumped);
    require(left_out >= 4, "found " + std::to_string(left_out) + " mappings of arenas");
    comm->barrier();
  });
  EXPECT_EQ(errors_of(ends), "");
}

// By a real core file, with a limit in case it grows.
TEST(Limits, ACrashedRankLeavesASmallCore) {
  std::string pattern;
  std::getline(std::ifstream("/proc/sys/kernel/core_pattern"), pattern);
  rlimit now{};
  ::getrlimit(RLIMIT_CORE, &now);
  constexpr rlim_t kMost = rlim_t{1} << 30;
  if (pattern != "core" || now.rlim_max < kMost) GTEST_SKIP() << "core files go to '" << pattern << "'";
  const TempFolder folder;
  const auto ends = with_ranks(2, [&](const Comm& comm) {
    std::filesystem::current_path(folder.path());
    comm->barrier();
    if (comm->rank() == 0) return;
    const rlimit cores{kMost, now.rlim_max};
    ::setrlimit(RLIMIT_CORE, &cores);
    ::signal(SIGSEGV, SIG_DFL);
    ::raise(SIGSEGV);
  });
  EXPECT_EQ(ends[1].signal, SIGSEGV);
  std::uintmax_t bytes = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder.path())) bytes += file.file_size();
  EXPECT_GT(bytes, 0U);
  EXPECT_LT(bytes, kMost / 2);
}

TEST(Limits, OfFileSizesIsAnErrorWithAWayOut) {
  const auto ends = fork_ranks(2, [](int rank) {
    const rlimit bytes{1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &bytes);
    join_run("not reached", rank, 2);
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.signal, 0);
    EXPECT_TRUE(contains(end.error, "File too large") && contains(end.error, "ulimit -f")) << end.error;
  }
}

// Where vm.memfd_noexec is 2 the kernel gives no other memory.
TEST(Limits, SharedMemoryIsNeverExecutable) {
  const int probe = ::memfd_create("probe", 8U);  // MFD_NOEXEC_SEAL
  if (probe < 0) GTEST_SKIP() << "a kernel before 6.3";
  ::close(probe);
  const comm::shm::Arena arena(1 << 20, 4096);
  constexpr int kSealExec = 0x20;
  EXPECT_NE(::fcntl(arena.fd(), F_GET_SEALS) & kSealExec, 0);
}

}  // namespace
}  // namespace zero::test::limits_test
