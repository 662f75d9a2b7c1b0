// A thread that runs jobs one after the other, in the order in which they were added, for as long as its owner lives.
// What a job may touch meanwhile is its owner's business. Threads that watch, or that wait for a device, are no jobs.
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
  ~Executor();  // runs what was added
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // The result is ready when the job has ended and what it held is freed; it has the job's error, for every get().
  // threads: of OpenMP in the job. By default those of the caller, as each thread has a number of its own.
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
  std::thread thread_;  // made for the first job
};

inline bool is_ready(const std::shared_future<void>& result) {
  return result.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

}  // namespace zero::base
