// See messenger.h.
#include "comm/gloo/messenger.h"

#include <pthread.h>

#include <algorithm>
#include <bit>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <system_error>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "base/check.h"
#include "comm/bootstrap/c10d_rendezvous.h"
#include "comm/bootstrap/fault_attribution.h"
#include "comm/gloo/mesh.h"

namespace zero::comm {
namespace {

using std::chrono::milliseconds;

// How long the destructor waits until peers have received what this rank sent.
constexpr milliseconds kFarewell{2000};

constexpr const char* kAllGatherBytes = "all_gather_bytes";
// Maximum number of concurrent groups including the run: 6 bits of a tag.
constexpr int kMostGroups = 64;

// gloo's writes to a dead peer's socket would raise SIGPIPE and end the process. Blocks the signal in this thread and
// the threads it starts, without changing the program's handling elsewhere.
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

}  // namespace

// The connections of the run. MessageWorks may keep them alive after the Messenger.
struct Messenger::Lane {
  net::ProcessInfo identity;
  net::NodeTopology hosts;
  std::unique_ptr<FailureDetector> watch;
  // [Note: two connections] Messages to higher ranks and those to lower ranks have connections of their own. gloo holds
  // a connection's lock while it writes, and meanwhile its thread for incoming data polls that lock. With as many ranks
  // as cores it thereby takes the core from the thread that writes, until the scheduler's next tick: milliseconds.
  c10::intrusive_ptr<c10d::ProcessGroupGloo> up, down;
  c10d::ProcessGroupGloo& connection(int from, int to) const { return from < to ? *up : *down; }
  std::mutex mutex;             // guards the members below and every Operation's messages
  std::set<Operation*> active;  // all with pending messages
  std::deque<std::pair<std::uint64_t, std::weak_ptr<Operation>>> two_phase;  // by index among all, `issued`
  std::uint64_t issued = 0;                                                  // operations of all channels
  std::atomic<int> waits{0};                                                 // in the program's thread
  std::uint64_t groups = 1;  // existing groups, one bit each; the first is the run
  bool had_groups = false;
  std::optional<PeerFailure> failure;  // why operations fail from now on
  std::map<const Channel*, std::function<void(const PeerFailure&)>> on_failure;

  // Those of two phases that are still in the first one, up to this index.
  std::vector<std::shared_ptr<Operation>> in_first_phase(std::uint64_t before);
  void connect(milliseconds limit);
  net::NodeTopology meet_hosts(milliseconds limit);
  void stop_all(const PeerFailure& cause) noexcept;
  int rank() const { return identity.rank; }
  int size() const { return identity.size; }
  bool elsewhere(int peer) const {
    return hosts.empty() ? !identity.one_host() : hosts.host_of(peer) != hosts.host_of(rank());
  }
};

// The ranks of one Messenger: those of the run, or of a group.
struct Messenger::Channel {
  std::shared_ptr<Lane> lane;
  net::ProcessInfo identity;
  net::NodeTopology hosts;
  int number = 0;  // number of the group in the lane; 0: the run
  std::atomic<milliseconds> timeout{milliseconds(0)};
  std::atomic<std::uint64_t> bytes_across{0};
  bool closed = false;                   // the Messenger was destroyed; guarded by the lane's mutex
  std::function<bool()> advance_others;  // Transport::on_wait()
};

class Messenger::Operation final : public MessageWork, public std::enable_shared_from_this<Operation> {
 public:
  Operation(std::shared_ptr<Channel> channel, std::uint64_t sequence, Call call)
      : channel_(std::move(channel)), lane_(channel_->lane), sequence_(sequence), call_(std::move(call)) {
    // [Note: tags] Messages match by peer and tag: 6 bits for the group, 12 for the sequence, 12 for the call, 1 for
    // the phase. With the call in the tag, ranks whose calls differ wait for each other and are reported, instead of
    // receiving each other's data.
    const auto hash = std::hash<std::string>{}(call_.text()) & 0xfff;
    tag_ = static_cast<int>(static_cast<unsigned>(channel_->number) << 25 | (sequence_ & 0xfff) << 13 | hash << 1);
    std::lock_guard lock(lane_->mutex);
    issued_ = ++lane_->issued;
    lane_->active.insert(this);
  }

  ~Operation() override {
    if (const auto thread = waiter()) thread->wait();
    std::lock_guard lock(lane_->mutex);
    lane_->active.erase(this);
    messages_.clear();
  }

  void send(int peer, const at::Tensor& bytes) override { post(peer, bytes, true); }
  void receive(int peer, const at::Tensor& bytes) override { post(peer, bytes, false); }
  void send_control(int peer, const at::Tensor& bytes) override { post(peer, bytes, true, /*payload=*/false); }
  void then(std::function<void()> step) override { step_ = std::move(step); }
  void then_post(std::function<void()> step) override {
    step_ = std::move(step);
    std::lock_guard lock(lane_->mutex);
    lane_->two_phase.emplace_back(issued_, weak_from_this());
  }

  void fail_all_ranks(const std::string& text) override {
    const PeerFailure failure{-1, at_call(call_.op, text, lane_->rank(), lane_->size(), sequence_)};
    lane_->watch->abort(failure.rank, failure.reason);
    std::lock_guard lock(lane_->mutex);
    if (!lane_->failure) lane_->failure = failure;
    throw CommError(lane_->failure->reason, lane_->failure->rank);
  }

  void wait() override {
    const auto& others = channel_->advance_others;
    const Counted counted(others ? &lane_->waits : nullptr);
    if (!waiter() && !(others && others())) return finish();
    // Peers may need operations of other groups over shared memory to reach this one.
    const auto thread = start_waiter();
    while (thread.wait_for(milliseconds(1)) != std::future_status::ready && others && others()) {
    }
    thread.get();
  }

  // gloo can wait for a message but not poll it, so the first query starts a thread that waits.
  bool done() override {
    {
      std::unique_lock lock(mutex_, std::try_to_lock);
      if (lock.owns_lock() && (finished_ || error_)) return true;
    }
    return start_waiter().wait_for(milliseconds(0)) == std::future_status::ready;
  }

  // A thread that completes the operation; at most one.
  std::shared_future<void> start_waiter() {
    std::lock_guard lock(waiter_mutex_);
    if (!waiter_.valid()) waiter_ = std::async(std::launch::async, [this] { finish(); }).share();
    return waiter_;
  }
  bool in_first_phase() const { return !second_; }

  // Completes the first phase, so that peers can complete the operation even if this rank first waits for a later one.
  void advance() {
    std::lock_guard lock(mutex_);
    if (!finished_ && !error_) guarded([&] { first_phase(); });
  }

  // Requires the lane's mutex.
  void stop_messages() const noexcept {
    for (const auto& message : messages_) message.work->abort();
  }

  const Call& call() const { return call_; }

 private:
  struct Message {
    int peer;  // rank of the run
    bool sends;
    c10::intrusive_ptr<c10d::Work> work;
  };

  class Counted {
   public:
    explicit Counted(std::atomic<int>* count) : count_(count) {
      if (count_ != nullptr) ++*count_;
    }
    ~Counted() {
      if (count_ != nullptr) --*count_;
    }
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;

   private:
    std::atomic<int>* const count_;
  };

  std::optional<std::shared_future<void>> waiter() const {
    std::lock_guard lock(waiter_mutex_);
    return waiter_.valid() ? std::optional(waiter_) : std::nullopt;
  }

  void post(int peer, const at::Tensor& bytes, bool sends, bool payload = true) {
    if (bytes.numel() == 0) return;
    std::lock_guard lock(lane_->mutex);
    if (lane_->failure) throw CommError(lane_->failure->reason, lane_->failure->rank);
    std::vector<at::Tensor> tensors{bytes};
    const HoldBrokenPipe hold;
    const int tag = tag_ | (second_ ? 1 : 0);
    peer = channel_->identity.rank_in_run(peer);
    if (sends && payload && call_.op != kAllGatherBytes && lane_->elsewhere(peer))
      channel_->bytes_across += bytes.nbytes();
    try {
      const int own = lane_->rank();
      messages_.push_back({peer, sends,
                           sends ? lane_->connection(own, peer).send(tensors, peer, tag)
                                 : lane_->connection(peer, own).recv(tensors, peer, tag)});
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
        if (channel_->closed)
          throw CommError("[comm::gloo] got a wait after the end of the Communicator, expected it before");
      }
      advance_earlier();
      first_phase();
      drain();
    });
    finished_ = true;
    lane_->watch->ended({channel_->identity.group_id(), sequence_});
  }

  void advance_earlier() {
    for (const auto& op : lane_->in_first_phase(issued_)) op->advance();
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

  // Waits for the posted messages, receives first: they identify the late rank best.
  void drain() {
    const HoldBrokenPipe hold;
    const auto deadline = net::Clock::now() + channel_->timeout.load();
    if (posting_error_.first >= 0) fail(posting_error_.first, posting_error_.second, deadline);
    for (const bool sends : {false, true}) {
      for (std::size_t i = 0; i < messages_.size(); ++i) {
        const auto& message = messages_[i];  // only this thread adds or removes; it holds mutex_
        if (message.sends != sends) continue;
        // Rounded up: a wait that ended before the deadline would count as a broken connection.
        const auto left = std::chrono::ceil<milliseconds>(deadline - net::Clock::now());
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

  [[noreturn]] void fail(int peer, const std::string& error, net::Clock::time_point deadline);

  const std::shared_ptr<Channel> channel_;
  const std::shared_ptr<Lane> lane_;
  const std::uint64_t sequence_;
  std::uint64_t issued_ = 0;
  const Call call_;
  int tag_ = 0;
  std::recursive_mutex mutex_;  // for one waiting thread at a time, including that of done()
  std::vector<Message> messages_;
  std::pair<int, std::string> posting_error_{-1, ""};
  std::function<void()> step_;
  std::atomic<bool> second_ = false;
  bool finished_ = false;
  std::exception_ptr error_;
  mutable std::mutex waiter_mutex_;
  std::shared_future<void> waiter_;
};

std::vector<std::shared_ptr<Messenger::Operation>> Messenger::Lane::in_first_phase(std::uint64_t before) {
  std::vector<std::shared_ptr<Operation>> operations;  // the last reference to one may be here, and ends unlocked
  {
    std::lock_guard lock(mutex);
    std::erase_if(two_phase, [](const auto& entry) { return entry.second.expired(); });
    for (const auto& [issued, weak] : two_phase)
      if (auto op = issued < before ? weak.lock() : nullptr) operations.push_back(std::move(op));
  }
  std::erase_if(operations, [](const auto& op) { return !op->in_first_phase(); });
  return operations;
}

void Messenger::Lane::stop_all(const PeerFailure& cause) noexcept {
  std::lock_guard lock(mutex);
  if (!failure) failure = cause;
  for (auto* op : active) op->stop_messages();
  for (const auto& [channel, callback] : on_failure) callback(cause);
}

void Messenger::Operation::fail(int peer, const std::string& error, net::Clock::time_point deadline) {
  const Waiting waiting{call_,
                        sequence_,
                        lane_->rank(),
                        lane_->size(),
                        channel_->timeout.load(),
                        channel_->number == 0 ? nullptr : &channel_->identity.run_ranks};
  const auto failure = net::Clock::now() >= deadline ? attribute_timeout(*lane_->watch, waiting, peer)
                                                     : attribute_disconnect(*lane_->watch, waiting, peer, error);
  {
    std::lock_guard lock(lane_->mutex);
    if (!lane_->failure) lane_->failure = failure;
  }
  throw CommError(failure.reason, failure.rank);
}

void Messenger::Lane::connect(milliseconds limit) {
  const HoldBrokenPipe hold;
  const auto deadline = net::Clock::now() + limit;
  watch = rendezvous(identity, limit);
  hosts = meet_hosts(limit);
  const auto left = std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(deadline - net::Clock::now()));
  auto mesh = connect_mesh(identity, *watch, left);
  up = std::move(mesh.up);
  down = std::move(mesh.down);
  watch->on_failure([this](const PeerFailure& cause) { stop_all(cause); });
}

// Gathers every rank's local rank and local size.
net::NodeTopology Messenger::Lane::meet_hosts(milliseconds limit) {
  if (identity.one_host()) return net::NodeTopology(std::vector<std::pair<int, int>>());
  const auto deadline = net::Clock::now() + limit;
  const auto key = [](int rank) { return base::join("host/", rank); };
  watch->set(key(rank()), base::join(identity.local_rank, " ", identity.local_size));
  std::vector<std::pair<int, int>> local(static_cast<std::size_t>(size()));
  for (int r = 0; r < size(); ++r) {
    std::istringstream in(watch->get(key(r), deadline));
    in >> local[static_cast<std::size_t>(r)].first >> local[static_cast<std::size_t>(r)].second;
  }
  return net::NodeTopology(local);
}

Messenger::Messenger(const net::ProcessInfo& identity, milliseconds timeout) : channel_(std::make_shared<Channel>()) {
  const auto lane = std::make_shared<Lane>();
  lane->identity = identity;
  lane->connect(timeout);
  channel_->lane = lane;
  channel_->identity = identity;
  channel_->hosts = lane->hosts;
  channel_->timeout = timeout;
}

Messenger::Messenger(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}

// All members choose the same number: the first one that none of them uses.
std::unique_ptr<Messenger> Messenger::split(const Split& split) const {
  std::uint64_t taken = 1;
  std::vector<std::pair<int, int>> places;
  for (const auto& member : split.members) {
    std::uint64_t groups = 0;
    ZERO_CHECK(member.offer.size() >= sizeof groups, "an offer of another transport");
    std::memcpy(&groups, member.offer.data(), sizeof groups);
    taken |= groups;
    places.emplace_back(member.local_rank, member.local_size);
  }
  const int number = std::countr_one(taken);
  if (number >= kMostGroups)
    throw ConfigError(base::join("[Communicator::split] got one more group, expected at most ", kMostGroups - 1,
                                 " that live at once over TCP (", split.identity.place(), ")"));
  auto channel = std::make_shared<Channel>();
  channel->lane = channel_->lane;
  channel->identity = split.identity;
  channel->hosts = net::NodeTopology(places);
  channel->number = number;
  channel->timeout = channel_->timeout.load();
  std::lock_guard lock(channel->lane->mutex);
  channel->lane->groups |= std::uint64_t{1} << number;
  channel->lane->had_groups = true;
  return std::unique_ptr<Messenger>(new Messenger(std::move(channel)));
}

Messenger::~Messenger() {
  const HoldBrokenPipe hold;
  const auto& lane = channel_->lane;
  if (channel_->number != 0) {
    std::lock_guard lock(lane->mutex);
    channel_->closed = true;
    lane->groups &= ~(std::uint64_t{1} << channel_->number);
    lane->on_failure.erase(channel_.get());
    return;
  }
  lane->watch->on_failure(nullptr);
  const auto broken = [&] {
    std::lock_guard lock(lane->mutex);
    return lane->failure.has_value();
  };
  if (lane->had_groups && !broken()) {  // operations of groups are not counted, so all ranks end together
    lane->watch->began({0, ++sequence_}, "end");
    lane->watch->ended({0, sequence_});
  }
  // Whether all remaining ranks have completed the operations that this rank started.
  const auto all_ended = [&] {
    const auto progress = lane->watch->ask_progress(milliseconds(200));
    return std::all_of(progress.begin(), progress.end(),
                       [&](const auto& p) { return !p.answered || p.ended >= sequence_; });
  };
  // Closing a socket before the peer has read everything may lose data.
  const auto deadline = net::Clock::now() + kFarewell;
  while (!broken() && net::Clock::now() < deadline && !all_ended()) std::this_thread::sleep_for(milliseconds(5));
  {
    std::lock_guard lock(lane->mutex);
    channel_->closed = true;
    for (auto* op : lane->active) op->stop_messages();
  }
  lane->up.reset();
  lane->down.reset();
  lane->watch.reset();
}

std::shared_ptr<MessageWork> Messenger::begin(Call call) {
  const auto& lane = channel_->lane;
  {
    std::lock_guard lock(lane->mutex);
    if (!lane->failure) lane->failure = lane->watch->failure();
    if (lane->failure) throw CommError(lane->failure->reason, lane->failure->rank);
  }
  ++sequence_;
  lane->watch->began({channel_->identity.group_id(), sequence_}, call.text());
  return std::make_shared<Operation>(channel_, sequence_, std::move(call));
}

void Messenger::set_timeout(milliseconds timeout) { channel_->timeout = timeout; }

void Messenger::abort(int rank, const std::string& reason) noexcept { channel_->lane->watch->abort(rank, reason); }

void Messenger::on_failure(std::function<void(const PeerFailure&)> callback) {
  const auto& lane = channel_->lane;
  std::lock_guard lock(lane->mutex);
  if (callback && lane->failure) callback(*lane->failure);
  lane->on_failure.erase(channel_.get());
  if (callback) lane->on_failure.emplace(channel_.get(), std::move(callback));
}

std::shared_ptr<MessageWork> Messenger::begin_all_gather_bytes() { return begin({kAllGatherBytes, at::kByte, 0, -1}); }

FailureDetector& Messenger::watch() { return *channel_->lane->watch; }
const net::NodeTopology& Messenger::hosts() const { return channel_->hosts; }
std::uint64_t Messenger::bytes_across_hosts() const { return channel_->bytes_across; }

// The groups of this rank, one bit each.
std::string Messenger::split_offer() const {
  std::lock_guard lock(channel_->lane->mutex);
  return {reinterpret_cast<const char*>(&channel_->lane->groups), sizeof channel_->lane->groups};
}

void Messenger::advance() {
  if (channel_->lane->waits > 0) return;  // that wait does it
  for (const auto& op : channel_->lane->in_first_phase(UINT64_MAX)) {
    try {
      op->start_waiter();
    } catch (const std::system_error&) {  // no thread at the moment; the operation's own wait completes it
    }
  }
}

void Messenger::on_wait(std::function<bool()> advance_others) { channel_->advance_others = std::move(advance_others); }

}  // namespace zero::comm
