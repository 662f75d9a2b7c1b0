// One NCCL communicator with its stream and the thread that watches its operations. Operations are waited for on
// streams, so the host does not notice one that never ends: the watchdog does, finds the rank at fault, and makes the
// next call throw. If there is no next call, because the host waits for the GPU, it ends the process with that error:
// no value that depends on a failed operation may be read. Knows nothing of collectives.
#pragma once
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "comm/bootstrap/failure_detector.h"
#include "comm/bootstrap/fault_attribution.h"
#include "comm/nccl/library.h"

namespace zero::comm::nccl {

// How long a process that failed may make no call before it is ended; at most the time limit of its operations.
inline constexpr std::chrono::seconds kUnnoticed{15};

class Channel {
 public:
  // Of all ranks of the run. Makes the rank's GPU current in this thread.
  Channel(const net::ProcessInfo& identity, std::chrono::milliseconds timeout);
  // Of a group of the run's ranks, with their devices; a failure in one group is seen in all.
  Channel(const Channel& parent, const net::ProcessInfo& identity, std::chrono::milliseconds timeout);
  // Aborts after a failure; else waits a few seconds for operations that are under way.
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  struct Operation {
    Call call;
    std::uint64_t sequence = 0;
    std::chrono::milliseconds timeout{0};
    net::Clock::time_point deadline;
    c10::Event end{c10::kCUDA};    // recorded on the channel's stream before watch_operation()
    std::vector<at::Tensor> kept;  // what it uses; until release() or the end
  };
  // The operation is enqueued, and ended when its event is reached.
  void watch_operation(std::shared_ptr<Operation> operation);
  // Its memory may be used again by work that is ordered after it.
  void release(Operation& operation);

  // Calls NCCL and waits until the call is no longer in progress. Throws CommError.
  template <class F>
  void call(const Operation& operation, const F& body) {
    const std::lock_guard lock(calls_);
    require_open();
    settle(body(), waiting(operation), operation.deadline);
  }

  std::optional<PeerFailure> failure() const;
  // Throws the failure as CommError. The communicator is aborted first: what waits for it on a stream continues.
  void check() {
    if (const auto failed = failure()) raise(*failed);
  }

  bool is_group() const { return !identity.run_ranks.empty(); }
  FailureDetector& detector() const { return *detector_; }
  void* communicator() const { return communicator_; }

  const net::ProcessInfo identity;
  const Library& library;
  const c10::Device device;
  const c10::Stream stream;

 private:
  Channel(const net::ProcessInfo& identity, const Library& library, c10::Device device,
          std::shared_ptr<FailureDetector> detector, std::shared_ptr<std::atomic<bool>> noticed,
          std::chrono::milliseconds timeout);
  void start(const Operation& first);
  Waiting waiting(const Operation& operation) const;
  void require_open();  // requires calls_: it may have been aborted meanwhile
  void settle(int result, const Waiting& waiting, net::Clock::time_point deadline);
  // What keeps an operation from ending, if anything is known to. `result`: of Library::progress().
  std::optional<PeerFailure> obstacle(int result, const Waiting& waiting, net::Clock::time_point deadline);
  [[noreturn]] void raise(const PeerFailure& failure);
  void abort();
  void fail(const PeerFailure& found);
  // The watchdog's.
  void run();
  bool ended(const Operation& operation);
  bool look(const Operation& operation);
  [[noreturn]] void end_process(const Operation& operation);

  const std::shared_ptr<FailureDetector> detector_;
  const std::shared_ptr<std::atomic<bool>> noticed_;  // of all channels of the run: a call has thrown the failure
  std::mutex calls_;                                  // NCCL's, for this communicator
  void* communicator_ = nullptr;

  mutable std::mutex mutex_;  // guards the members below; locked after calls_
  std::condition_variable news_;
  std::deque<std::shared_ptr<Operation>> flying_;  // in the order of the stream
  std::optional<PeerFailure> failure_;
  bool stop_ = false;
  std::thread watchdog_;
};

}  // namespace zero::comm::nccl
