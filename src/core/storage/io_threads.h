// Requests by pread and pwrite, with one thread per request in flight. Used without io_uring.
#pragma once
#include <memory>
#include <thread>
#include <vector>

#include "storage/io_path.h"
#include "storage/request_queue.h"

namespace zero::storage {

class IoThreads final : public IoPath {
 public:
  // Number of threads: requests in flight, at most kMost.
  static constexpr int kMost = 32;
  static int threads_for(const IoSettings& settings);
  // Queue, alignment and faults must outlive it.
  IoThreads(RequestQueue& queue, int threads, std::int64_t alignment, FaultSource* faults);
  ~IoThreads() override;
  void wake() override {}  // threads wait in the queue
  bool add_memory(void*, std::int64_t) override { return false; }
  std::string name() const override;
  std::string memory_name() const override { return ""; }

 private:
  void run();
  RequestQueue& queue_;
  const std::int64_t alignment_;
  FaultSource* const faults_;
  std::vector<std::thread> threads_;
};

// A thread with all signals blocked. The program handles its signals in other threads, and SIGXFSZ would end the
// process instead of failing the write.
template <class Body>
std::thread quiet_thread(Body body);

}  // namespace zero::storage

#include <signal.h>

template <class Body>
std::thread zero::storage::quiet_thread(Body body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  struct Restore {
    sigset_t& before;
    ~Restore() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  } restore{before};
  return std::thread(std::move(body));
}
