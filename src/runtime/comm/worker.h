// A thread that carries out a rank's collectives one after the other, in the order of their calls, for transports whose
// collectives have several steps: the order is the same on all ranks, whatever the order of their waits, and the
// program computes meanwhile.
#pragma once
#include <omp.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

#include <zero/work.h>

namespace zero::comm {

// Runs jobs one after the other on a thread of its own.
class Worker {
 public:
  Worker()
      : thread_([this] {
          omp_set_num_threads(1);  // the program's threads compute
          run();
        }) {}
  ~Worker() {
    {
      std::lock_guard lock(mutex_);
      end_ = true;
    }
    news_.notify_all();
    thread_.join();
  }

  std::shared_future<void> add(std::function<void()> job) {
    std::packaged_task<void()> task(std::move(job));
    auto result = task.get_future().share();
    {
      std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(task));
    }
    news_.notify_all();
    return result;
  }

  // Whether all jobs have ended within the limit.
  bool idle_within(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    return news_.wait_for(lock, limit, [this] { return jobs_.empty() && !busy_; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      news_.wait(lock, [this] { return end_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      auto job = std::move(jobs_.front());
      jobs_.pop_front();
      busy_ = true;
      lock.unlock();
      job();
      job = {};  // with its tensors
      lock.lock();
      busy_ = false;
      news_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable news_;
  std::deque<std::packaged_task<void()>> jobs_;
  bool busy_ = false, end_ = false;
  std::thread thread_;
};

class JobWork final : public Work {
 public:
  explicit JobWork(std::shared_future<void> result) : result_(std::move(result)) {}
  void wait() override { result_.get(); }
  bool done() override { return result_.wait_for(std::chrono::milliseconds(0)) == std::future_status::ready; }

 private:
  std::shared_future<void> result_;
};

}  // namespace zero::comm
