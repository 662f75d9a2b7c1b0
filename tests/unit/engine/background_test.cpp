// engine/background.h: one job at a time, its errors, and the end of its owner.
#include <gtest/gtest.h>
#include <omp.h>

#include <atomic>
#include <future>
#include <stdexcept>
#include <thread>

#include <zero/errors.h>

#include "engine/background.h"

namespace zero::engine {
namespace {

TEST(BackgroundJobs, RunInAnotherThreadOneAfterTheOther) {
  Background background;
  EXPECT_FALSE(background.running());
  background.wait();  // nothing to wait for
  std::thread::id first, second;
  background.begin([&] { first = std::this_thread::get_id(); });
  background.wait();
  background.begin([&] { second = std::this_thread::get_id(); });
  background.wait();
  EXPECT_NE(first, std::this_thread::get_id());
  EXPECT_NE(first, std::thread::id());
  EXPECT_EQ(first, second) << "one thread for all jobs";
}

TEST(BackgroundJobs, ASecondOneIsRefusedWhileOneRuns) {
  Background background;
  std::promise<void> go;
  background.begin([&] { go.get_future().wait(); });
  EXPECT_TRUE(background.running());
  EXPECT_THROW(background.begin([] {}), InternalError);
  go.set_value();
  background.wait();
  EXPECT_FALSE(background.running());
}

TEST(BackgroundJobs, AnErrorStaysUntilTheNextBegins) {
  Background background;
  background.begin([] { throw std::runtime_error("of the job"); });
  for (int times = 0; times < 2; ++times) {
    try {
      background.wait();
      ADD_FAILURE() << "no error";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "of the job");
    }
  }
  EXPECT_FALSE(background.running());
  background.begin([] {});
  EXPECT_NO_THROW(background.wait());
}

TEST(BackgroundJobs, TheEndWaitsForTheJob) {
  std::atomic<bool> done{false};
  std::promise<void> begun;
  {
    Background background;
    background.begin([&] {
      begun.set_value();
      for (int i = 0; i < 1000; ++i) std::this_thread::yield();
      done = true;
    });
    begun.get_future().wait();
  }
  EXPECT_TRUE(done);
}

TEST(BackgroundJobs, HaveTheCallersNumberOfThreads) {
  const int before = omp_get_max_threads();
  Background background;
  for (const int threads : {1, 3}) {
    omp_set_num_threads(threads);
    int seen = 0;
    background.begin([&] { seen = omp_get_max_threads(); });
    background.wait();
    EXPECT_EQ(seen, threads);
  }
  omp_set_num_threads(before);
}

}  // namespace
}  // namespace zero::engine
