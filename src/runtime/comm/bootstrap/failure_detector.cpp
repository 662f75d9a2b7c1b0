// See failure_detector.h. Rank 0 forwards each rank's messages to all others, and accepts a connection's statements
// only about its own rank.
#include "comm/bootstrap/failure_detector.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "base/check.h"
#include "base/printable.h"
#include "comm/bootstrap/frames.h"
#include "comm/collective_call.h"

namespace zero::comm {
namespace {

// Before the proof, a connection sends a frame of the handshake and nothing else.
constexpr std::size_t kMostUnprovedBytes = 256;
// Read at a time from one connection, so that one that never stops does not fill the memory before its frames are used.
constexpr std::size_t kMostAtOnce = 2 * net::kMaxPayload;
// Keys: addresses of data connections, which grow with the number of ranks.
constexpr std::size_t kMostKeyBytes = 1 << 20, kMostKeyBytesOfRank = 256 << 10;

// A rank that waits for so long in a call tells rank 0 its latest ones.
constexpr auto kLongWait = std::chrono::seconds(2);
constexpr int kTickMs = 1000;
constexpr std::size_t kMostCalls = 32, kMostCallBytes = 1024;

}  // namespace

FailureDetector::FailureDetector(const net::ProcessInfo& identity, base::Descriptor listener,
                                 std::chrono::milliseconds timeout)
    : rank_(identity.rank),
      size_(identity.size),
      where_(base::join("rank ", rank_, "/", size_)),
      key_(net::key_of(identity)),
      left_(identity.size, false),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  ZERO_CHECK(hub(), "only rank 0 listens");
  gather_peers(std::move(listener), net::Clock::now() + timeout);
  thread_ = std::thread([this] { run(); });
}

FailureDetector::FailureDetector(const net::ProcessInfo& identity, const Locate& locate,
                                 std::chrono::milliseconds timeout)
    : rank_(identity.rank),
      size_(identity.size),
      where_(base::join("rank ", rank_, "/", size_)),
      key_(net::key_of(identity)),
      left_(identity.size, false),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  join_hub(locate, net::Clock::now() + timeout);
  thread_ = std::thread([this] { run(); });
}

FailureDetector::~FailureDetector() {
  if (::getpid() != pid_) {  // a forked child has the rank's sockets but must not use them, and has no thread to join
    (void)new std::thread(std::move(thread_));
    return;
  }
  post(frame::kFarewell, rank_, "", -1);
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  eventfd_write(wake_.get(), 1);
  if (thread_.joinable()) thread_.join();
}

bool FailureDetector::flush(Link& link) {
  while (!link.out.empty()) {
    const auto sent = send(link.fd.get(), link.out.data(), link.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    link.out.erase(0, static_cast<std::size_t>(sent));
  }
  return true;
}

bool FailureDetector::receive(Link& link) {
  char buffer[16384];
  while (link.in.size() < kMostAtOnce) {  // poll() returns at once for the rest
    const auto got = recv(link.fd.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (got > 0) {
      link.in.append(buffer, static_cast<std::size_t>(got));
      if (link.rank < 0 && link.in.size() > kMostUnprovedBytes) return false;
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      link.error = got == 0 ? 0 : errno;
      return false;
    } else if (errno == EAGAIN) {
      return true;
    }
  }
  return true;
}

void FailureDetector::post(char kind, int rank, std::string_view payload, int except) {
  const auto bytes = net::encode(kind, rank, payload);
  std::lock_guard lock(mutex_);
  for (auto& link : links_) {
    if (!link.fd || link.rank < 0 || link.rank == except) continue;
    link.out += bytes;
    flush(link);  // the thread detects a broken link
  }
  eventfd_write(wake_.get(), 1);
}

void FailureDetector::run() {
  std::optional<net::Clock::time_point> stopping;
  bool first = true;
  for (;;) {
    std::vector<pollfd> polled{{wake_.get(), POLLIN, 0}};
    bool unsent = false;
    {
      std::lock_guard lock(mutex_);
      for (auto& link : links_) {
        unsent |= link.fd && !link.out.empty();
        polled.push_back({link.fd.get(), static_cast<short>(POLLIN | (link.out.empty() ? 0 : POLLOUT)), 0});
      }
      if (stop_ && !stopping) stopping = net::Clock::now() + std::chrono::milliseconds(500);
    }
    if (stopping && (!unsent || net::Clock::now() > *stopping)) return;
    poll(polled.data(), polled.size(), first ? 0 : stopping ? 20 : kTickMs);
    if (polled[0].revents != 0) {
      eventfd_t ignored;
      eventfd_read(wake_.get(), &ignored);
    }
    if (!stopping) report_wait();
    // After start-up links are never moved, and only this thread closes them.
    for (std::size_t i = 0; i < links_.size(); ++i) {
      // Frames that followed the welcome were received with it.
      if (polled[i + 1].revents == 0 && !first) continue;
      auto& link = links_[i];
      bool alive = true;
      {
        std::lock_guard lock(mutex_);
        alive = flush(link);
      }
      alive &= receive(link);
      net::Frame frame;
      int taken = 0;
      while ((taken = net::decode(link.in, frame)) == 1) handle(frame, link.rank);
      if (link.fd && (!alive || taken < 0)) link_ended(link);
    }
    first = false;
  }
}

void FailureDetector::handle(const net::Frame& frame, int from) {
  if (hub() && frame.rank != from) return;
  if (frame.rank < 0 || frame.rank >= size_) return;
  if (frame.kind == frame::kAbort) {
    if (hub()) post(frame::kAbort, frame.rank, frame.payload, from);
    const auto space = std::min(frame.payload.find(' '), frame.payload.size());
    note_failure(std::atoi(frame.payload.c_str()),
                 base::printable(frame.payload.substr(std::min(space + 1, frame.payload.size()))));
    return;
  }
  if (frame.kind == frame::kWaits) return compare_waits(frame.rank, frame.payload);
  bool too_many = false;
  {
    std::lock_guard lock(mutex_);
    if (frame.kind == frame::kKey) {
      const auto end = frame.payload.find('\0');
      if (end != std::string::npos) too_many = !store(frame.payload.substr(0, end), frame.payload.substr(end + 1));
    } else if (frame.kind == frame::kFarewell) {
      left_[frame.rank] = true;
    } else if (frame.kind == frame::kProgress && frame.rank < static_cast<int>(progress_.size())) {
      PeerProgress progress{true, 0, 0, {}};
      std::istringstream words(frame.payload);
      words >> progress.begun >> progress.ended;
      words.ignore(1);
      std::getline(words, progress.op);
      progress.op = base::printable(progress.op, base::Lines::Escape);
      progress_[frame.rank] = progress;
    }
  }
  news_.notify_all();
  if (too_many) {
    return abort(frame.rank,
                 base::join("[comm::watch] got more than ", keys_bytes_, " bytes of keys, the last of rank ",
                            frame.rank, ", expected the addresses of ", size_, " ranks (", where_, ")."));
  }
  if (hub()) post(frame.kind, frame.rank, frame.payload, from);
  if (frame.kind == frame::kAsk) {
    std::string mine;
    {
      std::lock_guard lock(mutex_);
      mine = progress_payload();
    }
    post(frame::kProgress, rank_, mine, -1);
  }
}

std::string FailureDetector::progress_payload() const {
  return base::join(own_progress_.begun, " ", own_progress_.ended, " ", own_progress_.op);
}

// False: the ranks have sent more than they need. Requires the mutex.
bool FailureDetector::store(const std::string& key, std::string value) {
  keys_bytes_ += key.size() + value.size();
  if (keys_bytes_ > kMostKeyBytes + kMostKeyBytesOfRank * static_cast<std::size_t>(size_)) return false;
  keys_[key] = std::move(value);
  return true;
}

void FailureDetector::link_ended(Link& link) {
  bool death = false;
  {
    std::lock_guard lock(mutex_);
    link.fd.close();
    link.out.clear();
    death = !left_[link.rank] && !stop_;
  }
  if (!death) return;
  // A process that ends closes its connections. One that cannot be reached does not: only time limits tell.
  const bool cut = link.error == ETIMEDOUT || link.error == EHOSTUNREACH || link.error == ENETUNREACH ||
                   link.error == EHOSTDOWN || link.error == ENETDOWN;
  const auto reason =
      cut ? base::join("[comm::watch] got no answer from rank ", link.rank, "'s host for 20 s (",
                       std::strerror(link.error), "), expected one (", where_,
                       "). Hint: that host stopped, or the network to it is cut; the rank itself may be alive.")
          : base::join("[comm::watch] got the end of rank ", link.rank, "'s process, expected it to continue (", where_,
                       "). Hint: look at that rank's own output; 'killed' often means out of memory.");
  if (hub()) post(frame::kAbort, 0, base::join(link.rank, " ", reason), link.rank);
  note_failure(link.rank, reason);
}

void FailureDetector::note_failure(int rank, const std::string& reason) {
  const PeerFailure failure{rank, reason};
  std::function<void(const PeerFailure&)> callback;
  {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = failure;
    callback = callback_;
  }
  news_.notify_all();
  if (callback) callback(failure);
}

void FailureDetector::set(const std::string& key, const std::string& value) {
  ZERO_CHECK(key.size() + value.size() + 1 <= net::kMaxPayload, "key '", key, "' with ", value.size(), " bytes");
  {
    std::lock_guard lock(mutex_);
    keys_bytes_ += key.size() + value.size();
    keys_[key] = value;
  }
  news_.notify_all();
  post(frame::kKey, rank_, base::join(key, '\0', value), -1);
}

std::string FailureDetector::get(const std::string& key, net::Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  news_.wait_until(lock, deadline, [&] { return failure_ || keys_.contains(key); });
  if (const auto found = keys_.find(key); found != keys_.end()) return found->second;
  if (failure_) throw CommError(failure_->reason, failure_->rank);
  throw CommError(
      base::join("[comm::watch] got no key '", key, "' in time, expected every rank to continue (", where_, ")."));
}

bool FailureDetector::has(const std::string& key) {
  std::lock_guard lock(mutex_);
  return keys_.contains(key);
}

void FailureDetector::began(OperationId id, std::string op) {
  std::lock_guard lock(mutex_);
  if (calls_.size() == kMostCalls) calls_.pop_front();
  calls_.push_back({id, op, net::Clock::now(), false});
  if (id.group != 0) return;
  own_progress_.begun = id.sequence;
  own_progress_.op = std::move(op);
}

void FailureDetector::ended(OperationId id) {
  std::lock_guard lock(mutex_);
  for (auto& call : calls_) call.ended |= call.id == id;
  if (id.group == 0) own_progress_.ended = std::max(own_progress_.ended, id.sequence);
}

// Calls that this rank has left count as well: it may have sent what it had to send in a call that others do not make.
void FailureDetector::report_wait() {
  std::string lines;
  {
    std::lock_guard lock(mutex_);
    const auto open = std::find_if(calls_.begin(), calls_.end(), [](const OwnCall& call) { return !call.ended; });
    if (failure_ || open == calls_.end() || net::Clock::now() - open->begun < kLongWait) return;
    const std::pair state(open->id, calls_.back().id);
    if (std::exchange(reported_, state) == state) return;
    for (const auto& call : calls_)
      lines += base::join(call.id.group, " ", call.id.sequence, " ", call.op.substr(0, kMostCallBytes), "\n");
  }
  if (hub()) return compare_waits(0, lines);
  post(frame::kWaits, rank_, lines, -1);
}

// Two different calls with the same id never end, so there is nothing to wait for.
void FailureDetector::compare_waits(int rank, const std::string& calls) {
  if (!hub()) return;
  waits_.resize(static_cast<std::size_t>(size_));
  auto& own = waits_[static_cast<std::size_t>(rank)];
  own.clear();
  std::istringstream in(calls);
  OperationId id;
  for (std::string op; in >> id.group >> id.sequence && in.ignore(1) && std::getline(in, op);)
    own[id] = base::printable(op, base::Lines::Escape);
  for (const auto& [call, op] : own) {
    for (int other = 0; other < size_; ++other) {
      const auto& theirs = waits_[static_cast<std::size_t>(other)];
      const auto found = theirs.find(call);
      if (found == theirs.end() || found->second == op) continue;
      const auto first = std::min(rank, other), second = std::max(rank, other);
      return abort(-1, base::join("[Communicator] got different calls, expected the same on every rank: rank ", first,
                                  " calls ", first == rank ? op : found->second, ", rank ", second, " calls ",
                                  first == rank ? found->second : op, " (operation ", call.sequence,
                                  call.group == 0 ? "" : " of a group of both", "). Hint: ", kSameCallsHint, "."));
    }
  }
}

std::vector<PeerProgress> FailureDetector::ask_progress(std::chrono::milliseconds limit) {
  {
    std::lock_guard lock(mutex_);
    progress_.assign(size_, {});
    progress_[rank_] = own_progress_;
  }
  post(frame::kAsk, rank_, "", -1);
  std::unique_lock lock(mutex_);
  news_.wait_for(lock, limit, [&] {
    return failure_ || std::all_of(progress_.begin(), progress_.end(), [](const auto& p) { return p.answered; });
  });
  return progress_;
}

std::optional<PeerFailure> FailureDetector::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

std::optional<PeerFailure> FailureDetector::cause(std::chrono::milliseconds grace) {
  std::unique_lock lock(mutex_);
  const auto left = [&] { return static_cast<int>(std::find(left_.begin(), left_.end(), true) - left_.begin()); };
  news_.wait_for(lock, grace, [&] { return failure_ || left() < size_; });
  if (failure_) return failure_;
  if (left() == size_) return std::nullopt;
  return PeerFailure{
      left(), base::join("[comm::watch] got the orderly end of rank ", left(), ", expected it in this operation (",
                         where_, "). Hint: all ranks must make the same calls.")};
}

void FailureDetector::abort(int rank, const std::string& reason) noexcept {
  try {
    post(frame::kAbort, rank_, base::join(rank, " ", reason), -1);
    note_failure(rank, reason);
  } catch (...) {
    // Out of memory: the peers notice the end of this process.
  }
}

void FailureDetector::on_failure(std::function<void(const PeerFailure&)> callback) {
  PeerFailure failure;
  {
    std::lock_guard lock(mutex_);
    callback_ = callback;
    if (!failure_ || !callback_) return;
    failure = *failure_;
  }
  callback(failure);
}

}  // namespace zero::comm
