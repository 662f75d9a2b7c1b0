// The "gloo" transport: c10d::ProcessGroupGloo over TCP, for ranks on any hosts. Every collective
// is made of gloo's point-to-point messages, each rank to each other one directly: gloo's own
// all-gather takes a copy of the whole result, and its reduce-scatter sums bf16 in bf16 at every
// hop. So the payload is sent once, from where it lies to where it belongs, and sums are taken here
// in fp32 in rank order. c10d's exceptions end in this file; PeerWatch knows who failed.
#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <set>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "base/check.h"
#include "base/kernels.h"
#include "comm/blame.h"
#include "comm/c10d_rendezvous.h"
#include "comm/call.h"
#include "comm/peer_watch.h"
#include "comm/transport.h"

namespace zero::comm {
namespace {

using std::chrono::milliseconds;

// How long the end of a rank waits for the others to have received what it sent.
constexpr milliseconds kFarewell{2000};

// Bytes of a control message that go without a second round, and of the slot that holds them.
constexpr std::int64_t kInline = 248, kSlot = kInline + 8;

at::Tensor bytes_of(const at::Tensor& tensor, std::int64_t begin, std::int64_t end) {
  return tensor.narrow(0, begin, end - begin).view(at::kByte);
}

// gloo writes to sockets without asking for no signal, and a write to a dead peer's would end this
// process. The signal is held back from this thread, and from those it starts, without changing what
// the program does with it elsewhere.
class HoldBrokenPipe {
 public:
  HoldBrokenPipe() {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~HoldBrokenPipe() {
    const timespec now{};
    while (!was_pending_ && sigtimedwait(&pipe_, nullptr, &now) == SIGPIPE) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  HoldBrokenPipe(const HoldBrokenPipe&) = delete;
  HoldBrokenPipe& operator=(const HoldBrokenPipe&) = delete;

 private:
  sigset_t pipe_, before_;
  bool was_pending_ = false;
};

class Operation;

// What outlives the transport while a Work is held.
struct Lane {
  Identity identity;
  std::unique_ptr<PeerWatch> watch;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group;
  std::atomic<milliseconds> timeout{milliseconds(0)};
  std::mutex mutex;                                // the members below, and every Operation's messages
  std::set<Operation*> active;                     // all whose messages may be waited for
  std::deque<std::weak_ptr<Operation>> two_phase;  // those with a second phase to begin
  std::optional<PeerFailure> failure;              // why nothing goes on here

  bool closed = false;  // the transport is gone

  void stop_all(const PeerFailure& cause) noexcept;
  int rank() const { return identity.rank; }
  int size() const { return identity.size; }
};

// One collective in flight: messages, then maybe a step that posts more of them.
class Operation : public Work {
 public:
  Operation(std::shared_ptr<Lane> lane, std::uint64_t sequence, Call call)
      : lane_(std::move(lane)), sequence_(sequence), call_(std::move(call)) {
    // [Note: tags] Messages match by peer and tag. The call is a part of the tag, so that ranks that
    // have left the common order of calls wait for each other, and are named, instead of
    // receiving each other's bytes.
    const auto hash = std::hash<std::string>{}(call_.text()) & 0x3fff;
    tag_ = static_cast<int>((sequence_ & 0xffff) << 15 | hash << 1);
    std::lock_guard lock(lane_->mutex);
    lane_->active.insert(this);
  }

  ~Operation() override {
    if (waiter_.valid()) waiter_.wait();
    std::lock_guard lock(lane_->mutex);
    lane_->active.erase(this);
    messages_.clear();
  }

  void send(int peer, const at::Tensor& bytes) { post(peer, bytes, true); }
  void receive(int peer, const at::Tensor& bytes) { post(peer, bytes, false); }
  // Runs once the messages so far are through; it may post the second phase's messages.
  void then(std::function<void()> step) { step_ = std::move(step); }

  void wait() override {
    if (waiter_.valid()) {
      waiter_.get();
    } else {
      finish();
    }
  }

  // gloo cannot be asked whether a message is through, only waited for: the first question starts
  // a thread that waits.
  bool done() override {
    {
      std::unique_lock lock(mutex_, std::try_to_lock);
      if (lock.owns_lock() && (finished_ || error_)) return true;
    }
    if (!waiter_.valid()) {
      waiter_ = std::async(std::launch::async, [this] { finish(); }).share();
    }
    return waiter_.wait_for(milliseconds(0)) == std::future_status::ready;
  }

  // Completes the first phase, so that the peers can complete the whole: a rank that waits for a
  // later operation first must not hold them up.
  void advance() {
    std::lock_guard lock(mutex_);
    if (!finished_ && !error_) guarded([&] { first_phase(); });
  }

  // Under the lane's mutex.
  void stop_messages() const noexcept {
    for (const auto& message : messages_) message.work->abort();
  }

  const Call& call() const { return call_; }
  std::uint64_t sequence() const { return sequence_; }

 private:
  struct Message {
    int peer;
    bool sends;
    c10::intrusive_ptr<c10d::Work> work;
  };

  void post(int peer, const at::Tensor& bytes, bool sends) {
    if (bytes.numel() == 0) return;
    std::lock_guard lock(lane_->mutex);
    if (lane_->failure) throw CommError(lane_->failure->reason, lane_->failure->rank);
    std::vector<at::Tensor> tensors{bytes};
    const HoldBrokenPipe hold;
    const int tag = tag_ | (second_ ? 1 : 0);
    try {
      messages_.push_back(
          {peer, sends, sends ? lane_->group->send(tensors, peer, tag) : lane_->group->recv(tensors, peer, tag)});
    } catch (const std::exception& error) {
      posting_error_ = {peer, first_line(error)};
    }
  }

  void finish() {
    std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    if (finished_) return;
    guarded([&] {
      {
        std::lock_guard lane_lock(lane_->mutex);
        if (lane_->closed)
          throw CommError("[comm::gloo] got a wait after the end of the Communicator, expected it before");
      }
      advance_earlier();
      first_phase();
      drain();
    });
    finished_ = true;
    lane_->watch->ended(sequence_);
  }

  void advance_earlier() {
    std::vector<std::shared_ptr<Operation>> earlier;
    {
      std::lock_guard lock(lane_->mutex);
      std::erase_if(lane_->two_phase, [](const auto& op) { return op.expired(); });
      for (const auto& weak : lane_->two_phase) {
        auto op = weak.lock();
        if (op && op->sequence() < sequence_) earlier.push_back(std::move(op));
      }
    }
    for (const auto& op : earlier) op->advance();
  }

  void first_phase() {
    if (second_) return;
    drain();
    second_ = true;
    if (step_) std::exchange(step_, nullptr)();
  }

  template <class F>
  void guarded(F&& body) {
    try {
      body();
    } catch (...) {
      error_ = std::current_exception();
      throw;
    }
  }

  // Waits for the messages posted so far, receipts first: they show best who is late.
  void drain() {
    const HoldBrokenPipe hold;
    const auto deadline = Clock::now() + lane_->timeout.load();
    if (posting_error_.first >= 0) fail(posting_error_.first, posting_error_.second, deadline);
    for (const bool sends : {false, true}) {
      for (std::size_t i = 0; i < messages_.size(); ++i) {
        const auto& message = messages_[i];  // only this thread adds or removes, holding mutex_
        if (message.sends != sends) continue;
        const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
        bool complete = false;
        std::string error = "the wait was ended";
        try {
          complete = message.work->wait(std::max(left, milliseconds(1)));
        } catch (const std::exception& caught) {
          error = first_line(caught);
        }
        if (!complete) fail(message.peer, error, deadline);
      }
    }
    std::lock_guard lock(lane_->mutex);
    messages_.clear();
  }

  [[noreturn]] void fail(int peer, const std::string& error, Clock::time_point deadline);

  const std::shared_ptr<Lane> lane_;
  const std::uint64_t sequence_;
  const Call call_;
  int tag_ = 0;
  std::recursive_mutex mutex_;  // one waiter at a time; done()'s thread is one
  std::vector<Message> messages_;
  std::pair<int, std::string> posting_error_{-1, ""};
  std::function<void()> step_;
  bool second_ = false, finished_ = false;
  std::exception_ptr error_;
  std::shared_future<void> waiter_;
};

void Lane::stop_all(const PeerFailure& cause) noexcept {
  std::lock_guard lock(mutex);
  if (!failure) failure = cause;
  for (auto* op : active) op->stop_messages();
}

void Operation::fail(int peer, const std::string& error, Clock::time_point deadline) {
  const Waiting waiting{call_, sequence_, lane_->rank(), lane_->size(), lane_->timeout.load()};
  const auto failure = Clock::now() >= deadline ? blame_the_late(*lane_->watch, waiting, peer)
                                                : blame_the_broken(*lane_->watch, waiting, peer, error);
  {
    std::lock_guard lock(lane_->mutex);
    if (!lane_->failure) lane_->failure = failure;
  }
  throw CommError(failure.reason, failure.rank);
}

// What needs no message.
class Complete : public Work {
 public:
  void wait() override {}
  bool done() override { return true; }
};

class Gloo : public Transport {
 public:
  Gloo(const Identity& identity, milliseconds timeout) : Transport(identity), lane_(std::make_shared<Lane>()) {
    timeout_ = timeout;
    lane_->timeout = timeout;
    lane_->identity = identity;
    if (size() > 1) connect(timeout);
  }

  ~Gloo() override {
    if (size() == 1) return;
    const HoldBrokenPipe hold;
    lane_->watch->on_failure(nullptr);
    // A socket that is closed before the peer has read what was sent may lose it.
    const auto deadline = Clock::now() + kFarewell;
    while (!broken() && Clock::now() < deadline && !all_ended()) std::this_thread::sleep_for(milliseconds(5));
    {
      std::lock_guard lock(lane_->mutex);
      lane_->closed = true;
      for (auto* op : lane_->active) op->stop_messages();
    }
    lane_->group.reset();
    lane_->watch.reset();
  }

  std::string name() const override { return "gloo"; }

  void set_timeout(milliseconds timeout) override {
    timeout_ = timeout;
    lane_->timeout = timeout;
  }

  std::shared_ptr<Work> all_gather(at::Tensor out, at::Tensor in) override {
    const auto part = in.numel();
    auto own = out.narrow(0, part * rank(), part);
    if (part != 0 && own.const_data_ptr() != in.const_data_ptr()) {
      std::memcpy(own.mutable_data_ptr(), in.const_data_ptr(), in.nbytes());
    }
    if (size() == 1) return std::make_shared<Complete>();
    auto op = begin({"all_gather", out.scalar_type(), out.numel(), -1});
    gather_parts(*op, out, part);
    return op;
  }

  std::shared_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in) override {
    if (size() == 1) {
      sum(out, {in.const_data_ptr()});
      return std::make_shared<Complete>();
    }
    auto op = begin({"reduce_scatter", in.scalar_type(), in.numel(), -1});
    op->then(scatter_sums(*op, in, out.numel(), out));
    return op;
  }

  std::shared_ptr<Work> all_reduce(at::Tensor inout) override {
    if (size() == 1) return std::make_shared<Complete>();
    auto op = begin({"all_reduce", inout.scalar_type(), inout.numel(), -1});
    // The last parts are shorter where the number of elements does not divide.
    const auto part = (inout.numel() + size() - 1) / size();
    const auto [first, last] = range(inout, part, rank());
    auto sum_own = scatter_sums(*op, inout, part, inout.narrow(0, first, last - first));
    op->then([this_rank = rank(), ranks = size(), op = op.get(), inout, part, sum_own] {
      sum_own();
      gather_parts(*op, inout, part, this_rank, ranks);
    });
    std::lock_guard lock(lane_->mutex);
    lane_->two_phase.push_back(op);
    return op;
  }

  std::shared_ptr<Work> broadcast(at::Tensor inout, int root) override {
    if (size() == 1) return std::make_shared<Complete>();
    auto op = begin({"broadcast", inout.scalar_type(), inout.numel(), root});
    const auto bytes = bytes_of(inout, 0, inout.numel());
    if (rank() != root) {
      op->receive(root, bytes);
    } else {
      for_peers([&](int peer) { op->send(peer, bytes); });
    }
    return op;
  }

  std::shared_ptr<Work> all_to_all(at::Tensor out, at::Tensor in) override {
    const auto part = in.numel() / size();
    const auto own = part * rank();
    if (part != 0) {
      std::memcpy(out.narrow(0, own, part).mutable_data_ptr(), in.narrow(0, own, part).const_data_ptr(),
                  part * in.itemsize());
    }
    if (size() == 1) return std::make_shared<Complete>();
    auto op = begin({"all_to_all", in.scalar_type(), in.numel(), -1});
    for_peers([&](int peer) { op->receive(peer, bytes_of(out, part * peer, part * (peer + 1))); });
    for_peers([&](int peer) { op->send(peer, bytes_of(in, part * peer, part * (peer + 1))); });
    return op;
  }

  // One slot a rank: the length, and the message itself if it fits, so that a barrier and most
  // control messages are through at once. The rest follows for the ranks whose message is longer.
  std::vector<std::string> exchange(std::string_view mine) override {
    std::vector<std::string> messages(size());
    messages[rank()] = mine;
    if (size() == 1) return messages;
    auto op = begin({"exchange", at::kByte, 0, -1});
    auto slots = at::zeros({size() * kSlot}, at::kByte);
    const auto slot = [&](int r) { return static_cast<char*>(slots.mutable_data_ptr()) + r * kSlot; };
    const auto length = [&](int r) {
      std::uint64_t bytes;
      std::memcpy(&bytes, slot(r), sizeof bytes);
      return static_cast<std::int64_t>(bytes);
    };
    const auto in_slot = mine.substr(0, kInline);
    const std::uint64_t own_length = mine.size();
    std::memcpy(slot(rank()), &own_length, sizeof own_length);
    std::memcpy(slot(rank()) + sizeof own_length, in_slot.data(), in_slot.size());
    gather_parts(*op, slots, kSlot);
    std::vector<at::Tensor> rest(size());
    op->then([&] {
      for_peers([&](int peer) {
        rest[peer] = at::empty({std::max<std::int64_t>(0, length(peer) - kInline)}, at::kByte);
        op->receive(peer, rest[peer]);
      });
      const auto own = at::empty({std::max<std::int64_t>(0, length(rank()) - kInline)}, at::kByte);
      if (own.numel() > 0) std::memcpy(own.mutable_data_ptr(), mine.data() + kInline, own.nbytes());
      for_peers([&](int peer) { op->send(peer, own); });
    });
    op->wait();
    for_peers([&](int peer) {
      messages[peer].assign(slot(peer) + sizeof(std::uint64_t),
                            static_cast<std::size_t>(std::min(length(peer), kInline)));
      if (rest[peer].numel() > 0)
        messages[peer].append(static_cast<const char*>(rest[peer].const_data_ptr()), rest[peer].nbytes());
    });
    return messages;
  }

  void abort(const std::string& reason) noexcept override {
    if (lane_->watch) lane_->watch->abort(rank(), reason);
  }

 private:
  void connect(milliseconds timeout) {
    const HoldBrokenPipe hold;
    const auto deadline = Clock::now() + timeout;
    lane_->watch = meet(identity(), timeout);
    const auto left = std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(deadline - Clock::now()));
    try {
      auto options = c10d::ProcessGroupGloo::Options::create(left);
      options->threads = 1;  // messages need none, c10d wants one
      const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
      if (identity().one_host()) {
        options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
      } else if (interface != nullptr && *interface != '\0') {
        options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(interface));
      } else {
        options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(lane_->watch->own_address()));
      }
      lane_->group =
          c10::make_intrusive<c10d::ProcessGroupGloo>(store_of(*lane_->watch, left), rank(), size(), options);
    } catch (const std::exception& error) {
      if (const auto cause = lane_->watch->cause(milliseconds(200))) throw CommError(cause->reason, cause->rank);
      const auto text =
          base::join("[comm::gloo] got '", first_line(error), "', expected connections to all ranks (rank ", rank(),
                     "/", size(), "). Hint: set GLOO_SOCKET_IFNAME to the interface that joins the hosts.");
      lane_->watch->abort(rank(), text);
      throw CommError(text, rank());
    }
    lane_->watch->on_failure([lane = lane_.get()](const PeerFailure& cause) { lane->stop_all(cause); });
  }

  bool broken() {
    std::lock_guard lock(lane_->mutex);
    return lane_->failure.has_value();
  }

  // Every rank that is still there has ended what this one has begun.
  bool all_ended() {
    const auto progress = lane_->watch->ask_progress(milliseconds(200));
    return std::all_of(progress.begin(), progress.end(),
                       [&](const auto& p) { return !p.answered || p.ended >= sequence_; });
  }

  std::shared_ptr<Operation> begin(Call call) {
    {
      std::lock_guard lock(lane_->mutex);
      if (!lane_->failure) lane_->failure = lane_->watch->failure();
      if (lane_->failure) throw CommError(lane_->failure->reason, lane_->failure->rank);
    }
    ++sequence_;
    lane_->watch->began(sequence_, call.text());
    return std::make_shared<Operation>(lane_, sequence_, std::move(call));
  }

  // From the next rank on, so that not everybody sends to rank 0 first.
  template <class F>
  static void for_peers(int rank, int size, F&& body) {
    for (int i = 1; i < size; ++i) body((rank + i) % size);
  }
  template <class F>
  void for_peers(F&& body) const {
    for_peers(rank(), size(), body);
  }

  static std::pair<std::int64_t, std::int64_t> range(const at::Tensor& whole, std::int64_t part, int owner) {
    return {std::min(whole.numel(), part * owner), std::min(whole.numel(), part * (owner + 1))};
  }

  static void gather_parts(Operation& op, const at::Tensor& whole, std::int64_t part, int rank, int size) {
    for_peers(rank, size, [&](int peer) {
      const auto [begin, end] = range(whole, part, peer);
      op.receive(peer, bytes_of(whole, begin, end));
    });
    const auto [begin, end] = range(whole, part, rank);
    for_peers(rank, size, [&, begin = begin, end = end](int peer) { op.send(peer, bytes_of(whole, begin, end)); });
  }
  void gather_parts(Operation& op, const at::Tensor& whole, std::int64_t part) const {
    gather_parts(op, whole, part, rank(), size());
  }

  static void sum(const at::Tensor& out, const std::vector<const void*>& parts) {
    if (out.numel() == 0) return;
    const auto dtype = sum_dtype(out.scalar_type());
    base::sum_parts(out.mutable_data_ptr(), dtype, parts.data(), static_cast<int>(parts.size()), dtype, out.numel());
  }

  // Sends every rank its part of `in` and receives the peers' versions of this rank's; the result
  // sums them into `out`, which may be that part.
  std::function<void()> scatter_sums(Operation& op, const at::Tensor& in, std::int64_t part,
                                     const at::Tensor& out) const {
    const auto numel = out.numel();
    auto received = at::empty({numel * (size() - 1)}, in.options());
    std::vector<const void*> parts(size());
    std::int64_t slot = 0;
    for (int r = 0; r < size(); ++r) {
      if (numel == 0) break;
      if (r == rank()) {
        parts[r] = in.narrow(0, part * r, numel).const_data_ptr();
        continue;
      }
      parts[r] = static_cast<const char*>(received.const_data_ptr()) + slot * static_cast<std::int64_t>(in.itemsize());
      op.receive(r, bytes_of(received, slot, slot + numel));
      slot += numel;
    }
    for_peers([&](int peer) {
      const auto [begin, end] = range(in, part, peer);
      op.send(peer, bytes_of(in, begin, end));
    });
    return [out, in, received, parts] { sum(out, parts); };
  }

  std::shared_ptr<Lane> lane_;
  std::uint64_t sequence_ = 0;
};

}  // namespace

std::unique_ptr<Transport> make_gloo(const Identity& identity, milliseconds timeout) {
  return std::make_unique<Gloo>(identity, timeout);
}

}  // namespace zero::comm
