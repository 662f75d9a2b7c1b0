// One thread per ring takes requests, submits them and handles their completions. It blocks only in the kernel; new
// transfers wake it through an eventfd that is read in the same ring. Every submission result is checked: entries that
// were not accepted stay in the ring's queue for the next call, and if a ring stops accepting entries, its thread
// continues with plain system calls. Requests are not linked, because a short one would cancel the others.
#include "storage/io_ring.h"

#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <zero/errors.h>

#include "base/check.h"
#include "base/log.h"
#include "storage/io_threads.h"

namespace zero::storage {
namespace {

using base::join;
using Next = RequestQueue::Next;

constexpr std::uint64_t kWake = ~std::uint64_t{0};
constexpr std::int64_t kNothing = INT64_MIN;
constexpr std::int64_t kMostRegistered = std::int64_t{1} << 30;  // the kernel's limit for one registered piece
constexpr unsigned kPieces = 4096;
constexpr int kRefusals = 100;

// Memory that all rings have registered, with the same indices.
struct Piece {
  char *begin, *end;
  unsigned number;
};

class Ring {
 public:
  Ring(RequestQueue& queue, const IoSettings& settings, std::int64_t alignment, FaultSource* faults)
      : queue_(queue),
        settings_(settings),
        alignment_(alignment),
        faults_(faults),
        together_(settings.single_submit ? 1 : std::max(4, settings.queue_depth / 4)),
        slots_(static_cast<std::size_t>(settings.queue_depth)) {
    const auto entries = static_cast<unsigned>(settings.queue_depth) + 1;  // plus the eventfd's
    int error = faults_ ? -faults_->ring_setup() : 0;
    if (error == 0) error = io_uring_queue_init(entries, &ring_, IORING_SETUP_COOP_TASKRUN);
    if (error == -EINVAL) error = io_uring_queue_init(entries, &ring_, 0);  // before Linux 5.19
    if (error == 0 && (wake_ = eventfd(0, EFD_CLOEXEC)) < 0) {
      error = -errno;
      io_uring_queue_exit(&ring_);
    }
    if (error != 0)
      throw IoError(join("[SwapFile] cannot set up io_uring with ", entries, " entries: ", system_text(-error),
                         ". Hint: `zero doctor` says why; aio.queue_depth may be too large."));
    io_uring_ring_dontfork(&ring_);
    registers_ = (faults_ && faults_->registration() != 0) || io_uring_register_buffers_sparse(&ring_, kPieces) != 0
                     ? false
                     : true;
    for (std::size_t i = slots_.size(); i > 0; --i) free_.push_back(i - 1);
    thread_ = quiet_thread([this] { run(); });
  }

  // The queue must be closed.
  ~Ring() {
    ring_bell();
    thread_.join();
    io_uring_queue_exit(&ring_);
    close(wake_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  void wake() {
    if (asleep_.exchange(false)) ring_bell();
  }

  bool add(const Piece& piece) {
    if (!registers_ || (faults_ && faults_->registration() != 0)) return false;
    iovec memory{piece.begin, static_cast<std::size_t>(piece.end - piece.begin)};
    __u64 tag = 0;
    if (io_uring_register_buffers_update_tag(&ring_, piece.number, &memory, &tag, 1) != 1) return false;
    const std::lock_guard lock(pieces_mutex_);
    pieces_.push_back(piece);
    return true;
  }

 private:
  struct Slot {
    Request request;
    std::uint64_t prepared_as = 0;
    std::int64_t sent = 0, shown = kNothing;  // `shown`: the injected result, if the kernel returns `sent`
  };

  void ring_bell() {
    const std::uint64_t one = 1;
    while (write(wake_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  void run() {
    arm_wake();
    while (!broken_) {
      take_requests();
      if (!free_.empty()) {
        // Nothing to take now. A transfer added after this sees `asleep_`; one added before is found by the second
        // check.
        asleep_ = true;
        take_requests();
      }
      if (!over_.empty()) {
        // Submit first: waking a thread takes longer than filling the ring.
        if (io_uring_sq_ready(&ring_) > 0) submit(0);
        finish_transfers();
      }
      if (queue_.closed() && in_flight_ == 0 && !armed_) break;
      submit(1);
      asleep_ = false;
      reap();
    }
    finish_transfers();
    if (broken_) go_on_plainly();
  }

  void finish_transfers() {
    for (const auto& transfer : over_) transfer->finish();
    over_.clear();
  }

  void take_requests() {
    // Without overlap, a new batch begins when the last one has ended.
    if (!settings_.overlap_events && in_flight_ > 0) return;
    while (!free_.empty() && !broken_) {
      auto& slot = slots_[free_.back()];
      if (!queue_.take(slot.request)) return;
      const auto number = free_.back();
      free_.pop_back();
      ++in_flight_;
      prepare(number);
    }
  }

  io_uring_sqe* entry() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    while (!sqe && !broken_) {  // prepared entries were not accepted yet
      submit(0);
      sqe = io_uring_get_sqe(&ring_);
    }
    if (sqe) ++prepared_;
    return sqe;
  }

  void arm_wake() {
    if (auto* sqe = entry()) {
      io_uring_prep_read(sqe, wake_, &rung_, sizeof rung_, 0);
      io_uring_sqe_set_data64(sqe, kWake);
      armed_ = true;
    }
  }

  // Prepares an entry for the rest of the slot's request.
  void prepare(std::size_t number) {
    auto& slot = slots_[number];
    auto& request = slot.request;
    const auto offset = request.place.offset + request.moved;
    slot.sent = request.left();
    slot.shown = kNothing;
    slot.prepared_as = UINT64_MAX;
    auto* sqe = entry();
    if (!sqe) return;  // broken: handled by go_on_plainly()
    slot.prepared_as = prepared_;
    if (faults_) {
      const auto fault = faults_->request(request.write, offset, slot.sent);
      if (fault.error != 0) {
        slot.shown = -fault.error;
      } else if (fault.at_most >= 0 && fault.at_most < slot.sent) {
        slot.shown = fault.at_most;
        slot.sent = fault.at_most / alignment_ * alignment_;
      }
    }
    const int fd = request.place.file->fd();
    char* const data = request.data + request.moved;
    const auto bytes = static_cast<unsigned>(slot.sent);
    const auto at = static_cast<std::uint64_t>(offset);
    const int piece = piece_of(data, slot.sent);
    if (slot.shown < 0 && slot.shown != kNothing) {
      io_uring_prep_nop(sqe);
    } else if (bytes == 0) {
      io_uring_prep_nop(sqe);
    } else if (piece >= 0) {
      request.write ? io_uring_prep_write_fixed(sqe, fd, data, bytes, at, piece)
                    : io_uring_prep_read_fixed(sqe, fd, data, bytes, at, piece);
    } else {
      request.write ? io_uring_prep_write(sqe, fd, data, bytes, at) : io_uring_prep_read(sqe, fd, data, bytes, at);
    }
    io_uring_sqe_set_data64(sqe, number);
    if (static_cast<int>(io_uring_sq_ready(&ring_)) >= together_) submit(0);
  }

  int piece_of(const char* data, std::int64_t bytes) {
    if (!registers_) return -1;
    const std::lock_guard lock(pieces_mutex_);
    for (const auto& piece : pieces_)
      if (data >= piece.begin && data + bytes <= piece.end) return static_cast<int>(piece.number);
    return -1;
  }

  // Submits the prepared entries and waits for `completions` completions. Entries that were not accepted are submitted
  // by the next call.
  void submit(unsigned completions) {
    const int fault = faults_ ? faults_->submission() : 0;
    const unsigned prepared = io_uring_sq_ready(&ring_);
    int taken = 0;
    if (fault == 0) taken = io_uring_submit_and_wait(&ring_, completions);
    if (fault > 0) taken = -fault;
    if (taken > 0 || (taken == 0 && prepared == 0)) {
      refusals_ = 0;
      return;
    }
    if (taken == -EINTR) return;
    // Pending completions may be the cause.
    if (io_uring_cq_ready(&ring_) > 0) return;
    const bool passing = taken == 0 || taken == -EAGAIN || taken == -EBUSY || taken == -ENOMEM;
    if (!passing || ++refusals_ >= kRefusals) {
      broken_ = true;
      base::log(LogLevel::Warning,
                join("io_uring takes no more requests (", taken < 0 ? system_text(-taken) : std::string("0 taken"),
                     "): falling back to plain system calls"));
      return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(std::min(5000, 20 << std::min(refusals_, 8))));
  }

  void reap() {
    io_uring_cqe* cqe = nullptr;
    while (io_uring_peek_cqe(&ring_, &cqe) == 0 && cqe) {
      const auto number = io_uring_cqe_get_data64(cqe);
      const auto result = static_cast<std::int64_t>(cqe->res);
      io_uring_cqe_seen(&ring_, cqe);
      if (number == kWake) {
        armed_ = false;
        if (!queue_.closed() && !broken_) arm_wake();
      } else {
        complete(static_cast<std::size_t>(number), result);
      }
    }
  }

  void complete(std::size_t number, std::int64_t result) {
    auto& slot = slots_[number];
    if (slot.shown != kNothing && (result == slot.sent || slot.shown < 0 || slot.sent == 0)) result = slot.shown;
    std::shared_ptr<Transfer> over;
    const auto next = queue_.judge(slot.request, result, &over);
    if (over) over_.push_back(std::move(over));
    if (next == Next::Ended) {
      release(number);
    } else if (next == Next::Plainly || broken_) {
      run_plainly(number);
    } else {
      if (next == Next::Pause) RequestQueue::pause(slot.request);
      prepare(number);
    }
  }

  void release(std::size_t number) {
    slots_[number].request = Request{};
    free_.push_back(number);
    --in_flight_;
  }

  // Completes the request in this thread.
  void run_plainly(std::size_t number) {
    send_to_the_end(slots_[number].request);
    release(number);
  }

  void send_to_the_end(Request& request) {
    while (true) {
      const auto next = queue_.judge(request, send_plainly(request, alignment_, faults_));
      if (next == Next::Ended) return;
      if (next == Next::Pause) RequestQueue::pause(request);
    }
  }

  // Waits for requests that the kernel has accepted, and performs all others with system calls.
  void go_on_plainly() {
    const auto taken = prepared_ - io_uring_sq_ready(&ring_);
    std::vector<bool> idle(slots_.size());
    for (const auto number : free_) idle[number] = true;
    for (std::size_t number = 0; number < slots_.size(); ++number)
      if (!idle[number] && slots_[number].prepared_as > taken) run_plainly(number);
    while (in_flight_ > 0) {
      reap();
      finish_transfers();
      if (in_flight_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    Request request;
    while (queue_.await(request)) send_to_the_end(request);
  }

  RequestQueue& queue_;
  const IoSettings settings_;
  const std::int64_t alignment_;
  FaultSource* const faults_;
  // Number of entries submitted at once. The kernel merges adjacent requests of one submission; with all in one
  // submission, the disk would be idle until the next.
  const int together_;
  io_uring ring_{};
  int wake_ = -1;
  bool registers_ = false;
  std::mutex pieces_mutex_;
  std::vector<Piece> pieces_;
  std::atomic<bool> asleep_{false};
  // Used by the thread only.
  std::vector<Slot> slots_;
  std::vector<std::size_t> free_;
  std::vector<std::shared_ptr<Transfer>> over_;  // complete transfers, whose waiting threads must be woken
  int in_flight_ = 0, refusals_ = 0;
  std::uint64_t prepared_ = 0, rung_ = 0;
  bool armed_ = false, broken_ = false;
  std::thread thread_;
};

class IoRing final : public IoPath {
 public:
  IoRing(RequestQueue& queue, const IoSettings& settings, std::int64_t alignment, FaultSource* faults) : queue_(queue) {
    try {
      for (int i = 0; i < settings.threads; ++i)
        rings_.push_back(std::make_unique<Ring>(queue, settings, alignment, faults));
    } catch (...) {
      queue_.close();
      throw;
    }
  }
  ~IoRing() override { queue_.close(); }

  void wake() override {
    for (const auto& ring : rings_) ring->wake();
  }

  bool add_memory(void* data, std::int64_t bytes) override {
    bool all = true;
    for (std::int64_t at = 0; at < bytes; at += kMostRegistered) {
      char* const begin = static_cast<char*>(data) + at;
      const Piece piece{begin, begin + std::min(kMostRegistered, bytes - at), next_};
      for (const auto& ring : rings_) all = next_ < kPieces && ring->add(piece) && all;
      ++next_;
    }
    (all ? registered_ : plain_) += bytes;
    return all;
  }

  std::string name() const override {
    return rings_.size() == 1 ? "io_uring" : join("io_uring, ", rings_.size(), " threads");
  }
  std::string memory_name() const override {
    if (plain_ == 0) return registered_ > 0 ? "registered buffers" : "";
    return registered_ > 0 ? join("registered buffers for ", registered_, " of ", registered_ + plain_, " bytes")
                           : "plain buffers";
  }

 private:
  RequestQueue& queue_;
  std::atomic<std::int64_t> registered_{0}, plain_{0};
  unsigned next_ = 0;
  std::vector<std::unique_ptr<Ring>> rings_;
};

}  // namespace

std::unique_ptr<IoPath> make_io_ring(RequestQueue& queue, const IoSettings& settings, std::int64_t alignment,
                                     FaultSource* faults) {
  return std::make_unique<IoRing>(queue, settings, alignment, faults);
}

}  // namespace zero::storage
