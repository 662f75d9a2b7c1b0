// The size of the last-level caches, from folders in the kernel's format.
#include "kernels/cache_size.h"
#include "support/folder.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace zero::base::cache_size_test {
namespace {

namespace fs = std::filesystem;

class CacheSize : public testing::Test {
 protected:
  void cache(int cpu, int index, const std::string& level, const std::string& type, const std::string& size,
             const std::string& sharers) {
    const auto place = folder_ / ("cpu" + std::to_string(cpu)) / "cache" / ("index" + std::to_string(index));
    fs::create_directories(place);
    std::ofstream(place / "level") << level << "\n";
    std::ofstream(place / "type") << type << "\n";
    std::ofstream(place / "size") << size << "\n";
    std::ofstream(place / "shared_cpu_list") << sharers << "\n";
  }

  const test::TempFolder temporary_;
  const fs::path& folder_ = temporary_.path();
};

TEST_F(CacheSize, EveryLastLevelCacheCountsOnce) {
  for (int cpu = 0; cpu < 4; ++cpu) {
    cache(cpu, 0, "1", "Data", "48K", std::to_string(cpu));
    cache(cpu, 1, "1", "Instruction", "32K", std::to_string(cpu));
    cache(cpu, 2, "2", "Unified", "1024K", std::to_string(cpu));
    cache(cpu, 3, "3", "Unified", "32768K", cpu < 2 ? "0-1" : "2-3");
  }
  fs::create_directories(folder_ / "cpufreq");
  EXPECT_EQ(kernels::last_level_cache_bytes(folder_.string()), std::size_t{64} << 20);
}

TEST_F(CacheSize, TheSecondLevelMayBeTheLast) {
  cache(0, 0, "1", "Data", "64K", "0");
  cache(0, 1, "2", "Unified", "2M", "0-3");
  cache(0, 2, "3", "Unified", "", "0-3");  // a size that the kernel does not report
  EXPECT_EQ(kernels::last_level_cache_bytes(folder_.string()), std::size_t{2} << 20);
}

TEST_F(CacheSize, NothingFoundIsZeroAndTheMachineHasSome) {
  EXPECT_EQ(kernels::last_level_cache_bytes(folder_.string()), 0u);
  EXPECT_EQ(kernels::last_level_cache_bytes((folder_ / "none").string()), 0u);
  EXPECT_GE(kernels::last_level_cache_bytes(), std::size_t{64} << 10);
}

}  // namespace
}  // namespace zero::base::cache_size_test
