// See executor.h.
#include "base/executor.h"

#include <exception>

namespace zero::base {

Executor::~Executor() {
  {
    std::lock_guard lock(mutex_);
    end_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::shared_future<void> Executor::append(std::function<void()> job) {
  Job added{std::move(job), {}};
  auto result = added.result.get_future().share();
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(added));
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  }
  changed_.notify_all();
  return result;
}

bool Executor::idle_within(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, limit, [this] { return jobs_.empty() && !busy_; });
}

void Executor::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return end_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    busy_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      job.run();
    } catch (...) {
      error = std::current_exception();
    }
    job.run = nullptr;  // with its tensors
    if (error)
      job.result.set_exception(error);
    else
      job.result.set_value();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace zero::base
