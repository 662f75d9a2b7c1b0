// See background.h.
#include "engine/background.h"

#include <omp.h>

#include "base/check.h"

namespace zero::engine {

Background::~Background() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !job_; });
    end_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Background::begin(std::function<void()> job) {
  const int threads = omp_get_max_threads();  // a setting of each thread
  {
    std::lock_guard lock(mutex_);
    ZERO_CHECK(!job_, "[Background::begin] a job is running");
    error_ = nullptr;
    job_ = [threads, job = std::move(job)] {
      omp_set_num_threads(threads);
      job();
    };
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  }
  changed_.notify_all();
}

void Background::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !job_; });
  if (error_) std::rethrow_exception(error_);
}

bool Background::running() const {
  std::lock_guard lock(mutex_);
  return static_cast<bool>(job_);
}

void Background::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return end_ || job_; });
    if (!job_) return;
    lock.unlock();
    std::exception_ptr error;
    try {
      job_();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    job_ = nullptr;
    error_ = error;
    changed_.notify_all();
  }
}

}  // namespace zero::engine
