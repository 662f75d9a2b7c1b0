// storage/io_buffers.h: alignment, reuse of pieces, and registration with the I/O path.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "storage/io_buffers.h"

namespace zero::storage::io_buffers_test {
namespace {

constexpr std::int64_t kPage = 4096, kHuge = 2 << 20;

class Path final : public IoPath {
 public:
  void wake() override {}
  bool add_memory(void* data, std::int64_t bytes) override {
    added.emplace_back(data, bytes);
    return true;
  }
  std::string name() const override { return "test"; }
  std::string memory_name() const override { return "plain"; }
  std::vector<std::pair<void*, std::int64_t>> added;
};

std::uintptr_t address(void* data) { return reinterpret_cast<std::uintptr_t>(data); }

TEST(IoBufferPool, WholePagesAndHugePages) {
  IoBuffers pool;
  Path path;
  pool.serve(&path);
  for (const auto& [asked, got] : {std::pair{std::int64_t{1}, kPage},
                                   {kPage, kPage},
                                   {kPage + 1, 2 * kPage},
                                   {kHuge - 1, kHuge},
                                   {kHuge, kHuge},
                                   {kHuge + 1, 2 * kHuge}}) {
    void* const data = pool.take(asked);
    ASSERT_NE(data, nullptr);
    EXPECT_EQ(address(data) % (asked >= kHuge ? kHuge : kPage), 0u) << asked;
    ASSERT_FALSE(path.added.empty());
    EXPECT_EQ(path.added.back(), std::pair(data, got)) << asked;
    std::memset(data, 1, static_cast<std::size_t>(got));
  }
}

TEST(IoBufferPool, TheSmallestThatFitsAndIsNotMuchTooLarge) {
  IoBuffers pool;
  void *const four = pool.take(4 * kPage), *const six = pool.take(6 * kPage), *const twenty = pool.take(20 * kPage);
  EXPECT_NE(pool.take(4 * kPage), four) << "taken";
  for (void* data : {twenty, six, four}) pool.give_back(data);
  EXPECT_EQ(pool.take(3 * kPage), four);
  EXPECT_EQ(pool.take(3 * kPage), six);
  void* const fresh = pool.take(3 * kPage);
  EXPECT_NE(fresh, twenty) << "more than twice as much";
  EXPECT_EQ(pool.take(11 * kPage), twenty);
}

TEST(IoBufferPool, APathLearnsOfAllThatIsAndWillBeMapped) {
  IoBuffers pool;
  Path first, second;
  void* const before = pool.take(kPage);
  pool.serve(&first);
  void* const after = pool.take(2 * kPage);
  EXPECT_EQ(first.added, (std::vector<std::pair<void*, std::int64_t>>{{before, kPage}, {after, 2 * kPage}}));
  pool.give_back(after);
  EXPECT_EQ(pool.take(2 * kPage), after);
  EXPECT_EQ(first.added.size(), 2u) << "registered once";
  pool.serve(nullptr);
  pool.take(5 * kPage);
  EXPECT_EQ(first.added.size(), 2u);
  pool.serve(&second);
  EXPECT_EQ(second.added.size(), 3u);
}

TEST(IoBufferPool, NothingIsCopiedIntoAChild) {
  IoBuffers pool;
  void* const data = pool.take(kPage);
  std::memset(data, 7, kPage);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // write(2) from unmapped memory fails; reading it directly would raise a signal.
    int ends[2];
    _exit(pipe(ends) == 0 && write(ends[1], data, 1) < 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace zero::storage::io_buffers_test
