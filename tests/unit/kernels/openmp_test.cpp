// One OpenMP run time in the process, libtorch's, whichever compiler built libzero (cmake/clang/omp.h): libzero's loops
// and those of torch's headers run on its threads.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <regex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "kernels/elementwise.h"

namespace zero::kernels::openmp_test {
namespace {

// The threads that took part. Each range waits for the others, so that no thread takes two.
class Meeting {
 public:
  explicit Meeting(std::size_t threads) : threads_(threads) {}
  void join() {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    {
      const std::lock_guard lock(mutex_);
      ids_.insert(std::this_thread::get_id());
    }
    while (size() < threads_ && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  }
  std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return ids_.size();
  }

 private:
  const std::size_t threads_;
  mutable std::mutex mutex_;
  std::set<std::thread::id> ids_;
};

std::set<std::string> openmp_libraries() {
  static const std::regex name(".*/(libg?omp|libiomp5|libomp5)[^/]*\\.so.*");
  std::set<std::string> found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (const auto at = line.find('/'); at != std::string::npos && std::regex_match(line.substr(at), name))
      found.insert(std::filesystem::path(line.substr(at)).filename().string());
  return found;
}

class OpenMp : public testing::Test {
 protected:
  OpenMp() { at::set_num_threads(kThreads); }
  ~OpenMp() override { at::set_num_threads(before_); }
  static constexpr int kThreads = 3;

 private:
  const int before_ = at::get_num_threads();
};

TEST_F(OpenMp, OneRunTimeServesAll) {
  Meeting ours(kThreads), theirs(kThreads);
  parallel_ranges(
      3 * 1024, [&](std::int64_t, std::int64_t) { ours.join(); }, 0);
  EXPECT_EQ(ours.size(), 3u);
  at::parallel_for(0, 3, 1, [&](std::int64_t, std::int64_t) { theirs.join(); });
  EXPECT_EQ(theirs.size(), 3u) << "at::parallel_for of torch's headers does not divide its loop";
  torch::ones({1 << 20}).sum();  // libtorch's own loops
  EXPECT_EQ(openmp_libraries(), std::set<std::string>{"libgomp.so.1"});
}

TEST_F(OpenMp, AnExceptionLeavesALoopOfTorchsHeaders) {
  const auto fail = [](std::int64_t begin, std::int64_t) {
    if (begin > 0) throw std::runtime_error("of a thread");
  };
  EXPECT_THROW(at::parallel_for(0, 3, 1, fail), std::runtime_error);
  EXPECT_EQ(at::parallel_reduce(
                0, 1000, 10, 0,
                [](std::int64_t begin, std::int64_t end, int sum) {
                  for (auto i = begin; i < end; ++i) sum += static_cast<int>(i);
                  return sum;
                },
                std::plus<>()),
            499500);
}

}  // namespace
}  // namespace zero::kernels::openmp_test
