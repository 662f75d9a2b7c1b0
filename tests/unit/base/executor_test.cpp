// Jobs run one after the other in a separate thread; their errors, and the end of their owner.
#include "base/executor.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <atomic>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

namespace zero::base::executor_test {
namespace {

using std::chrono::milliseconds;

TEST(ExecutorJobs, RunInAnotherThreadInTheirOrder) {
  Executor executor;
  EXPECT_TRUE(executor.idle_within(milliseconds(0)));
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  std::shared_future<void> last;
  for (int i = 0; i < 5; ++i)
    last = executor.add([&, i] {
      order.push_back(i);
      threads.push_back(std::this_thread::get_id());
    });
  last.get();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4}));
  EXPECT_NE(threads.front(), std::this_thread::get_id());
  EXPECT_EQ(threads, std::vector<std::thread::id>(5, threads.front())) << "one thread for all jobs";
}

TEST(ExecutorJobs, AreUnderWayUntilTheyEnd) {
  Executor executor;
  std::promise<void> go;
  const auto first = executor.add([&] { go.get_future().wait(); });
  const auto second = executor.add([] {});
  EXPECT_FALSE(is_ready(first));
  EXPECT_FALSE(is_ready(second));
  EXPECT_FALSE(executor.idle_within(milliseconds(1)));
  go.set_value();
  second.get();
  EXPECT_TRUE(is_ready(first));
  EXPECT_TRUE(executor.idle_within(milliseconds(60000)));
}

TEST(ExecutorJobs, HaveTheirOwnErrorForEveryoneWhoAsks) {
  Executor executor;
  const auto bad = executor.add([] { throw std::runtime_error("of the job"); });
  const auto good = executor.add([] {});
  for (int times = 0; times < 2; ++times) {
    try {
      bad.get();
      ADD_FAILURE() << "no error";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "of the job");
    }
  }
  EXPECT_NO_THROW(good.get());
}

TEST(ExecutorJobs, HoldNothingOnceTheResultIsReady) {
  std::atomic<int> gone{0};
  struct Held {
    explicit Held(std::atomic<int>& gone) : gone(gone) {}
    ~Held() {
      std::this_thread::sleep_for(milliseconds(20));
      ++gone;
    }
    std::atomic<int>& gone;
  };
  Executor executor;
  const auto hold = [&](bool throws) {
    executor
        .add([held = std::make_shared<Held>(gone), throws] {
          if (throws) throw std::runtime_error("of the job");
        })
        .wait();
  };
  hold(false);
  EXPECT_EQ(gone, 1);
  hold(true);
  EXPECT_EQ(gone, 2);
}

TEST(ExecutorJobs, AllRunBeforeTheEnd) {
  std::atomic<int> done{0};
  std::promise<void> begun;
  {
    Executor executor;
    executor.add([&] {
      begun.set_value();
      for (int i = 0; i < 1000; ++i) std::this_thread::yield();
      ++done;
    });
    executor.add([&] { ++done; });
    begun.get_future().wait();
  }
  EXPECT_EQ(done, 2);
}

TEST(ExecutorJobs, HaveTheCallersNumberOfThreadsOrTheirOwn) {
  const int before = omp_get_max_threads();
  Executor executor;
  int seen = 0;
  for (const int threads : {1, 3}) {
    omp_set_num_threads(threads);
    executor.add([&] { seen = omp_get_max_threads(); }).wait();
    EXPECT_EQ(seen, threads);
  }
  executor.add([&] { seen = omp_get_max_threads(); }, /*threads=*/2).wait();
  EXPECT_EQ(seen, 2);
  omp_set_num_threads(before);
}

}  // namespace
}  // namespace zero::base::executor_test
