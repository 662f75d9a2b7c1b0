#include "storage/io_threads.h"

#include <algorithm>

#include "base/check.h"

namespace zero::storage {

int IoThreads::threads_for(const IoSettings& settings) {
  return static_cast<int>(std::min<std::int64_t>(kMost, std::int64_t{settings.threads} * settings.queue_depth));
}

IoThreads::IoThreads(RequestQueue& queue, int threads, std::int64_t alignment, FaultSource* faults)
    : queue_(queue), alignment_(alignment), faults_(faults) {
  for (int i = 0; i < threads; ++i) threads_.push_back(quiet_thread([this] { run(); }));
}

IoThreads::~IoThreads() {
  queue_.close();
  for (auto& thread : threads_) thread.join();
}

void IoThreads::run() {
  Request request;
  while (queue_.await(request)) {
    while (true) {
      const auto next = queue_.judge(request, send_plainly(request, alignment_, faults_));
      if (next == RequestQueue::Next::Ended) break;
      if (next == RequestQueue::Next::Pause) RequestQueue::pause(request);
    }
  }
}

std::string IoThreads::name() const {
  return base::join(threads_.size(), threads_.size() == 1 ? " thread" : " threads", ", pread/pwrite");
}

}  // namespace zero::storage
