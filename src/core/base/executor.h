// A thread that runs jobs one after the other, in the order in which they were added. Not for threads that monitor
// something or wait for a device; those have their own loops.
#pragma once
#include <omp.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

namespace zero::base {

class Executor {
 public:
  Executor() = default;
  ~Executor();  // runs the remaining jobs
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // The result is ready when the job has ended and is destroyed. Every get() rethrows the job's exception. threads:
  // OpenMP threads of the job, by default as many as the caller's.
  std::shared_future<void> add(std::function<void()> job, int threads = omp_get_max_threads()) {
    return append([threads, job = std::move(job)] {
      omp_set_num_threads(threads);
      job();
    });
  }
  // Whether all jobs have ended within the limit.
  bool idle_within(std::chrono::milliseconds limit);

 private:
  struct Job {
    std::function<void()> run;
    std::promise<void> result;
  };
  std::shared_future<void> append(std::function<void()> job);
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool busy_ = false, end_ = false;
  std::thread thread_;  // started by the first job
};

inline bool is_ready(const std::shared_future<void>& result) {
  return result.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

}  // namespace zero::base
