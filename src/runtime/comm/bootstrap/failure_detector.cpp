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
#include <sstream>

#include "base/check.h"
#include "comm/collective_call.h"

namespace zero::comm {
namespace {

constexpr char kHello = 'H';     // client: token and world size
constexpr char kMissing = 'M';   // hub: the ranks that have not connected yet
constexpr char kWelcome = 'W';   // hub: all ranks are connected; the hub's address
constexpr char kKey = 'K';       // "key\0value"
constexpr char kAbort = 'X';     // "rank reason": that rank failed
constexpr char kFarewell = 'B';  // this rank ends normally
constexpr char kAsk = 'Q', kProgress = 'P';

constexpr auto kIntroduction = std::chrono::seconds(5);
constexpr auto kRetry = std::chrono::milliseconds(10);

int until_ms(net::Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - net::Clock::now()).count();
  return static_cast<int>(std::clamp<long long>(left, 0, 3'600'000));
}

// Constant-time comparison.
bool equal_secret(const std::string& a, const std::string& b) {
  unsigned char different = a.size() != b.size();
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) different |= static_cast<unsigned char>(a[i] ^ b[i]);
  return different == 0;
}

}  // namespace

FailureDetector::FailureDetector(const net::ProcessInfo& identity, const std::string& token, base::Descriptor listener,
                                 std::chrono::milliseconds timeout)
    : rank_(identity.rank),
      size_(identity.size),
      where_(base::join("rank ", rank_, "/", size_)),
      left_(identity.size, false),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  ZERO_CHECK(hub(), "only rank 0 listens");
  gather_peers(std::move(listener), net::Clock::now() + timeout, token);
  thread_ = std::thread([this] { run(); });
}

FailureDetector::FailureDetector(const net::ProcessInfo& identity, const std::string& token, const Locate& locate,
                                 std::chrono::milliseconds timeout)
    : rank_(identity.rank),
      size_(identity.size),
      where_(base::join("rank ", rank_, "/", size_)),
      left_(identity.size, false),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  join_hub(locate, net::Clock::now() + timeout, token);
  thread_ = std::thread([this] { run(); });
}

FailureDetector::~FailureDetector() {
  if (::getpid() != pid_) {  // a forked child has the rank's sockets but must not use them, and has no thread to join
    (void)new std::thread(std::move(thread_));
    return;
  }
  post(kFarewell, rank_, "", -1);
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  eventfd_write(wake_.get(), 1);
  if (thread_.joinable()) thread_.join();
}

std::string FailureDetector::missing(int* first) const {
  std::vector<bool> here(size_, false);
  here[0] = true;
  for (const auto& link : links_) {
    if (link.rank >= 0) here[link.rank] = true;
  }
  std::string text;
  *first = -1;
  for (int r = 0; r < size_; ++r) {
    if (here[r]) continue;
    if (*first < 0) *first = r;
    text += base::join(text.empty() ? "" : ", ", r);
  }
  return text;
}

bool FailureDetector::admit(Link& link, const net::Frame& hello, const std::string& token) {
  if (hello.kind != kHello || !equal_secret(hello.payload, base::join(size_, "\n", token))) return false;
  if (hello.rank <= 0 || hello.rank >= size_) return false;
  for (const auto& other : links_) {
    if (other.rank == hello.rank) return false;
  }
  link.rank = hello.rank;
  return true;
}

void FailureDetector::gather_peers(base::Descriptor listener, net::Clock::time_point deadline,
                                   const std::string& token) {
  const auto started = net::Clock::now();
  const auto fail = [&](int rank, const std::string& got, const std::string& hint) {
    const auto text =
        base::join("[comm::rendezvous] got ", got, ", expected all ", size_, " ranks (", where_, "). Hint: ", hint);
    post(kAbort, 0, base::join(rank, " ", text), -1);
    throw CommError(text, rank);
  };
  int first = -1;
  bool full = false;
  for (std::string absent = missing(&first); first >= 0; absent = missing(&first)) {
    if (net::Clock::now() >= deadline) {
      fail(
          first,
          base::join("no sign of rank ", absent, " within ",
                     duration_text(std::chrono::duration_cast<std::chrono::milliseconds>(net::Clock::now() - started))),
          full ? "rank 0 has no descriptor left for a connection that waits; raise ulimit -n."
               : "look at that rank's own output; it may have failed before, or cannot reach rank 0.");
    }
    std::vector<pollfd> polled{{listener.get(), POLLIN, 0}};
    for (const auto& link : links_) polled.push_back({link.fd.get(), POLLIN, 0});
    // Wake up regularly, to close connections that never identify themselves.
    poll(polled.data(), polled.size(), std::min(until_ms(deadline), 500));
    full = false;
    for (base::Descriptor fd; (fd = net::accept_from(listener, &full));) {
      links_.push_back({-1, std::move(fd), "", "", net::Clock::now()});
    }
    // The connection stays pending, so poll() would return at once.
    if (full) std::this_thread::sleep_for(kRetry);
    bool news = false;
    for (std::size_t i = 0; i < links_.size(); ++i) {
      auto& link = links_[i];
      const bool alive = receive(link);
      net::Frame frame;
      int taken = 0;
      if (link.rank < 0 && (taken = net::decode(link.in, frame)) == 1) {
        if (admit(link, frame, token)) {
          news = true;
        } else {
          taken = -1;
        }
      }
      const bool silent = link.rank < 0 && net::Clock::now() - link.since > kIntroduction;
      if (alive && taken >= 0 && !silent) continue;
      const int rank = link.rank;
      links_.erase(links_.begin() + static_cast<std::ptrdiff_t>(i--));
      if (rank >= 0)
        fail(rank, base::join("the end of rank ", rank, " during the start"), "look at that rank's own output.");
    }
    absent = missing(&first);
    if (news && first >= 0) post(kMissing, first, absent, -1);
  }
  std::erase_if(links_, [](const Link& link) { return link.rank < 0; });
  own_address_ = "127.0.0.1";
  for (const auto& link : links_) {
    const auto address = net::local_address(link.fd.get());
    if (!address.empty() && !net::is_loopback(address)) own_address_ = address;
  }
  // A later rendezvous at the same address must not connect to this one.
  listener.close();
  post(kWelcome, 0, own_address_, -1);
}

void FailureDetector::join_hub(const Locate& locate, net::Clock::time_point deadline, const std::string& token) {
  std::string absent, place;
  int first_absent = 0;
  while (net::Clock::now() < deadline) {
    const auto point = locate();
    if (!point.name.empty() || point.port != 0) place = point.text();
    Link link{0, point.name.empty() && point.port == 0 ? base::Descriptor() : net::connect_to(point), "", "",
              net::Clock::now()};
    bool alive = static_cast<bool>(link.fd);
    if (alive) {
      link.out = net::encode(kHello, rank_, base::join(size_, "\n", token));
      alive = flush(link);
    }
    while (alive && net::Clock::now() < deadline) {
      pollfd polled{link.fd.get(), POLLIN, 0};
      poll(&polled, 1, until_ms(deadline));
      alive = receive(link);
      net::Frame frame;
      for (int taken; (taken = net::decode(link.in, frame)) != 0;) {
        if (taken < 0) {
          alive = false;
          break;
        }
        if (frame.kind == kMissing) {
          absent = frame.payload;
          first_absent = frame.rank;
        } else if (frame.kind == kAbort) {
          throw CommError(frame.payload.substr(std::min(frame.payload.find(' ') + 1, frame.payload.size())),
                          std::atoi(frame.payload.c_str()));
        } else if (frame.kind == kWelcome) {
          own_address_ = net::local_address(link.fd.get());
          if (own_address_.empty() || net::is_loopback(own_address_)) own_address_ = frame.payload;
          links_.push_back(std::move(link));
          return;
        }
      }
    }
    // Rank 0 may not listen yet, or the socket belonged to another or an earlier run.
    std::this_thread::sleep_for(kRetry);
  }
  if (!absent.empty()) {
    throw CommError(base::join("[comm::rendezvous] got no sign of rank ", absent, " in time, expected all ", size_,
                               " ranks (", where_, "). Hint: look at that rank's own output."),
                    first_absent);
  }
  throw CommError(
      base::join("[comm::rendezvous] got no answer of rank 0 at ", place.empty() ? "its published place" : place,
                 " in time, expected it to listen there (", where_,
                 "). Hint: look at rank 0's own output; "
                 "all ranks must have the same address, port, run id and world size."),
      0);
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
  for (;;) {
    const auto got = recv(link.fd.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (got > 0) {
      link.in.append(buffer, static_cast<std::size_t>(got));
      if (link.rank < 0 && link.in.size() > net::kMaxPayload) return false;
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      return false;
    } else if (errno == EAGAIN) {
      return true;
    }
  }
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
    poll(polled.data(), polled.size(), first ? 0 : stopping ? 20 : -1);
    if (polled[0].revents != 0) {
      eventfd_t ignored;
      eventfd_read(wake_.get(), &ignored);
    }
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
  if (frame.kind == kAbort) {
    if (hub()) post(kAbort, frame.rank, frame.payload, from);
    const auto space = std::min(frame.payload.find(' '), frame.payload.size());
    note_failure(std::atoi(frame.payload.c_str()), frame.payload.substr(std::min(space + 1, frame.payload.size())));
    return;
  }
  {
    std::lock_guard lock(mutex_);
    if (frame.kind == kKey) {
      const auto end = frame.payload.find('\0');
      if (end != std::string::npos) keys_[frame.payload.substr(0, end)] = frame.payload.substr(end + 1);
    } else if (frame.kind == kFarewell) {
      left_[frame.rank] = true;
    } else if (frame.kind == kProgress && frame.rank < static_cast<int>(progress_.size())) {
      PeerProgress progress{true, 0, 0, {}};
      std::istringstream words(frame.payload);
      words >> progress.begun >> progress.ended;
      words.ignore(1);
      std::getline(words, progress.op);
      progress_[frame.rank] = progress;
    }
  }
  news_.notify_all();
  if (hub()) post(frame.kind, frame.rank, frame.payload, from);
  if (frame.kind == kAsk) {
    std::string mine;
    {
      std::lock_guard lock(mutex_);
      mine = progress_payload();
    }
    post(kProgress, rank_, mine, -1);
  }
}

std::string FailureDetector::progress_payload() const {
  return base::join(own_progress_.begun, " ", own_progress_.ended, " ", own_progress_.op);
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
  const auto reason =
      base::join("[comm::watch] got the end of rank ", link.rank, "'s process, expected it to go on (", where_,
                 "). Hint: look at that rank's own output; 'killed' often means out of memory.");
  if (hub()) post(kAbort, 0, base::join(link.rank, " ", reason), link.rank);
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
    keys_[key] = value;
  }
  news_.notify_all();
  post(kKey, rank_, base::join(key, '\0', value), -1);
}

std::string FailureDetector::get(const std::string& key, net::Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  news_.wait_until(lock, deadline, [&] { return failure_ || keys_.contains(key); });
  if (const auto found = keys_.find(key); found != keys_.end()) return found->second;
  if (failure_) throw CommError(failure_->reason, failure_->rank);
  throw CommError(
      base::join("[comm::watch] got no key '", key, "' in time, expected every rank to go on (", where_, ")."));
}

bool FailureDetector::has(const std::string& key) {
  std::lock_guard lock(mutex_);
  return keys_.contains(key);
}

void FailureDetector::began(std::uint64_t sequence, std::string op) {
  std::lock_guard lock(mutex_);
  own_progress_.begun = sequence;
  own_progress_.op = std::move(op);
}

void FailureDetector::ended(std::uint64_t sequence) {
  std::lock_guard lock(mutex_);
  own_progress_.ended = std::max(own_progress_.ended, sequence);
}

std::vector<PeerProgress> FailureDetector::ask_progress(std::chrono::milliseconds limit) {
  {
    std::lock_guard lock(mutex_);
    progress_.assign(size_, {});
    progress_[rank_] = own_progress_;
  }
  post(kAsk, rank_, "", -1);
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
    post(kAbort, rank_, base::join(rank, " ", reason), -1);
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
