// See channel.h.
#include "comm/nccl/channel.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "comm/bootstrap/c10d_rendezvous.h"
#include "gpu/plugin.h"
#include "observe/status_page.h"

namespace zero::comm::nccl {
namespace {

using std::chrono::milliseconds;

// How often the watchdog looks at the oldest operation.
constexpr milliseconds kLook{1};
constexpr std::chrono::seconds kFinalize{5};

// One GPU per rank: it becomes the caller's current device. libtorch's CUDA library is loaded first.
c10::Device own_device(const net::ProcessInfo& identity) {
  cuda::interface("[comm::nccl]");
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(identity.local_rank));
  c10::impl::VirtualGuardImpl(c10::kCUDA).setDevice(device);
  return device;
}

}  // namespace

// Braces, because the order matters: a rank without a GPU says so before it waits for the others.
Channel::Channel(const net::ProcessInfo& identity, milliseconds timeout)
    : Channel{identity,
              nccl::library(identity),
              own_device(identity),
              rendezvous(identity, timeout),
              std::make_shared<std::atomic<bool>>(false),
              timeout} {}

Channel::Channel(const Channel& parent, const net::ProcessInfo& identity, milliseconds timeout)
    : Channel(identity, parent.library, parent.device, parent.detector_, parent.noticed_, timeout) {}

Channel::Channel(const net::ProcessInfo& of, const Library& table, c10::Device on,
                 std::shared_ptr<FailureDetector> detector, std::shared_ptr<std::atomic<bool>> noticed,
                 milliseconds timeout)
    : identity(of),
      library(table),
      device(on),
      stream(c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(on, /*isHighPriority=*/true)),
      detector_(std::move(detector)),
      noticed_(std::move(noticed)) {
  Operation first;
  first.call = {"start", at::kByte, 0, -1};
  first.timeout = timeout;
  first.deadline = net::Clock::now() + timeout;
  try {
    start(first);
  } catch (...) {
    abort();
    throw;
  }
  watchdog_ = std::thread([this] { run(); });
}

Channel::~Channel() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  news_.notify_all();
  watchdog_.join();
  // Data from a failed peer never arrives; abort() is the only call that does not wait for it.
  if (!failure() && communicator_ != nullptr) {
    library.finalize(communicator_);
    const auto deadline = net::Clock::now() + kFinalize;
    int result = kInProgress;
    while (result == kInProgress && net::Clock::now() < deadline) {
      result = library.progress(communicator_);
      if (result == kInProgress) std::this_thread::sleep_for(kLook);
    }
    if (result == kSuccess) {
      library.destroy(communicator_);
      communicator_ = nullptr;
    }
  }
  abort();
}

void Channel::start(const Operation& first) {
  const auto key = "nccl id " + identity.run_id;
  Id id{};
  if (identity.rank == 0) {
    const int result = library.create_id(&id);
    if (result != kSuccess)
      throw CommError(base::join("[comm::nccl] got '", library.error_text(result), "', expected an id"), 0);
    detector_->set(key, std::string(id.bytes, sizeof id.bytes));
  } else {
    const auto text = detector_->get(key, first.deadline);
    std::memcpy(id.bytes, text.data(), std::min(text.size(), sizeof id.bytes));
  }
  const c10::DeviceGuard current(device);
  const std::lock_guard lock(calls_);
  settle(library.start(&communicator_, identity.size, &id, identity.rank), waiting(first), first.deadline);
}

// Progress is reported for operations of the run only.
Waiting Channel::waiting(const Operation& operation) const {
  return {operation.call,
          operation.sequence,
          identity.rank_in_run(identity.rank),
          is_group() ? identity.run_size : identity.size,
          operation.timeout,
          is_group() ? &identity.run_ranks : nullptr};
}

std::optional<PeerFailure> Channel::obstacle(int result, const Waiting& waiting, net::Clock::time_point deadline) {
  if (result != kSuccess && result != kInProgress)
    return attribute_disconnect(*detector_, waiting, -1, library.error_text(result));
  if (auto failed = detector_->failure()) return failed;
  if (net::Clock::now() >= deadline) return attribute_timeout(*detector_, waiting, -1);
  return std::nullopt;
}

void Channel::settle(int result, const Waiting& waiting, net::Clock::time_point deadline) {
  while (result != kSuccess) {
    if (const auto failed = obstacle(result, waiting, deadline)) {
      fail(*failed);
      *noticed_ = true;
      throw CommError(failed->reason, failed->rank);  // the caller holds calls_, which abort() takes
    }
    std::this_thread::yield();
    result = library.progress(communicator_);
  }
}

std::optional<PeerFailure> Channel::failure() const {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return failure_;
  }
  return detector_->failure();
}

void Channel::raise(const PeerFailure& failure) {
  *noticed_ = true;
  abort();
  throw CommError(failure.reason, failure.rank);
}

void Channel::require_open() {
  if (communicator_ != nullptr) return;
  const auto failed = failure();
  throw CommError(failed ? failed->reason : "[comm::nccl] got a call after the communicator's end",
                  failed ? failed->rank : -1);
}

void Channel::abort() {
  const std::lock_guard lock(calls_);
  if (auto* const ended = std::exchange(communicator_, nullptr)) library.abort(ended);
}

void Channel::watch_operation(std::shared_ptr<Operation> operation) {
  {
    const std::lock_guard lock(mutex_);
    flying_.push_back(std::move(operation));
  }
  news_.notify_all();
}

void Channel::release(Operation& operation) {
  std::vector<at::Tensor> kept;  // freed outside the lock
  const std::lock_guard lock(mutex_);
  kept.swap(operation.kept);
}

// Whether the operation has ended. A GPU that failed says so in every call: that is this rank's failure.
bool Channel::ended(const Operation& operation) {
  try {
    return operation.end.query();
  } catch (const std::exception& error) {
    const int own = identity.rank_in_run(identity.rank);
    fail({own, at_call(operation.call.op, base::join("got '", first_line(error), "' from the GPU"), own,
                       is_group() ? identity.run_size : identity.size, operation.sequence)});
    return false;
  }
}

void Channel::fail(const PeerFailure& found) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = found;
  }
  detector_->abort(found.rank, found.reason);
}

void Channel::run() {
  pthread_setname_np(pthread_self(), "zero-watchdog");
  const c10::DeviceGuard current(device);
  std::optional<net::Clock::time_point> failed_at;
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (flying_.empty()) {
      news_.wait(lock);
      continue;
    }
    const auto oldest = flying_.front();
    lock.unlock();
    if (ended(*oldest)) {
      detector_->ended({identity.group_id(), oldest->sequence});
      release(*oldest);
      lock.lock();
      flying_.pop_front();
      continue;
    }
    if (!failed_at) {
      if (look(*oldest)) failed_at = net::Clock::now();
    } else if (*noticed_) {
      abort();  // the program knows: whatever waits for the stream continues
    } else if (net::Clock::now() - *failed_at >= std::min<milliseconds>(kUnnoticed, oldest->timeout)) {
      end_process(*oldest);
    }
    lock.lock();
    news_.wait_for(lock, kLook);
  }
}

// Whether the operation, which has not ended, never will.
bool Channel::look(const Operation& operation) {
  int result = kInProgress;
  if (const std::unique_lock calls(calls_, std::try_to_lock); calls && communicator_ != nullptr)
    result = library.progress(communicator_);
  if (const auto failed = obstacle(result, waiting(operation), operation.deadline)) fail(*failed);
  return failure().has_value();
}

void Channel::end_process(const Operation& operation) {
  const auto reason = failure()->reason;
  const auto line =
      base::join("libzero: rank ", identity.rank_in_run(identity.rank), " ends, because its GPU waits for ",
                 operation.call.text(), " that failed: ", reason, "\n");
  observe::status_page().set_error(reason, ExitCode::kPeer);
  base::log(LogLevel::Error, reason);
  (void)!::write(STDERR_FILENO, line.data(), line.size());  // also without a log sink
  std::_Exit(static_cast<int>(ExitCode::kPeer));
}

}  // namespace zero::comm::nccl
