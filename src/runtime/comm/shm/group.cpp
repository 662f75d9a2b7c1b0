// Waits with a short spin, then on a futex in time slices, so that a dead peer is detected soon. Manages the first
// failure of the group, which all ranks report with the same text.
#include "comm/shm/group.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include <zero/errors.h>

#include "base/check.h"

namespace zero::comm::shm {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kSpin = 20us;
constexpr auto kSlice = 50ms;

int futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* timeout) {
  auto* const plain = reinterpret_cast<std::uint32_t*>(&word);
  return static_cast<int>(::syscall(SYS_futex, plain, operation, value, timeout, nullptr, 0));
}

std::string text_of(const char* text, std::size_t most) { return std::string(text, ::strnlen(text, most)); }

}  // namespace

const char* op_name(Op op) {
  switch (op) {
    case Op::None:
      return "nothing";
    case Op::AllGather:
      return "all_gather";
    case Op::ReduceScatter:
      return "reduce_scatter";
    case Op::AllReduce:
      return "all_reduce";
    case Op::Broadcast:
      return "broadcast";
    case Op::AllToAll:
      return "all_to_all";
    case Op::Exchange:
      return "all_gather_bytes";
    case Op::Scattered:
      return "peer_reduce_scatter";
  }
  return "nothing";
}

void Announcement::set_of(std::string_view name) {
  of_hash = std::hash<std::string_view>{}(name);
  const auto end = name.substr(name.size() - std::min(name.size(), sizeof of - 1));
  of[end.copy(of, end.size())] = '\0';
}

Call call_of(const Announcement& announcement) {
  const auto dtype = static_cast<c10::ScalarType>(announcement.dtype);
  return {op_name(announcement.op), dtype, announcement.numel, announcement.root, announcement.of};
}

Group::Group(const net::ProcessInfo& identity, Arena& mine, std::vector<Member> members,
             std::function<void()> abort_check, Mappings* mappings)
    : identity_(identity), abort_check_(std::move(abort_check)) {
  for (int rank = 0; rank < identity.size; ++rank) {
    Member& member = members[rank];
    pids_.push_back(member.pid);
    processes_.push_back(std::move(member.process));
    if (rank == identity.rank) {
      mappings_.push_back(nullptr);
      bases_.push_back(mine.base());
    } else {
      const int memory = member.memory.get();
      mappings_.push_back(mappings != nullptr ? mappings->of(memory) : std::make_shared<Mapping>(memory));
      bases_.push_back(mappings_.back()->base());
    }
    // The mapping is zero-initialized, which is valid for every field.
    pages_.push_back(std::launder(reinterpret_cast<Page*>(const_cast<std::byte*>(bases_.back()))));
  }
}

Group::~Group() = default;

void Group::ring() {
  // Sequentially consistent, as in sleep(): either this sees the sleeper, or the sleeper sees the new value.
  std::atomic<std::uint32_t>& bell = mine().bell;
  bell.fetch_add(1);
  if (mine().sleepers.load() != 0) futex(bell, FUTEX_WAKE, INT32_MAX, nullptr);
}

// Returns true if the time slice ended without a change.
bool Group::sleep(int peer, std::uint32_t bell) {
  Page& other = page(peer);
  const timespec slice{0, std::chrono::nanoseconds(kSlice).count()};
  other.sleepers.fetch_add(1);
  const int result = futex(other.bell, FUTEX_WAIT, bell, &slice);
  const bool over = result != 0 && errno == ETIMEDOUT;
  other.sleepers.fetch_sub(1);
  return over;
}

bool Group::gone(int peer) const {
  if (!processes_[peer]) return ::kill(pids_[peer], 0) != 0 && errno == ESRCH;  // a kernel before 5.3
  pollfd process{processes_[peer].get(), POLLIN, 0};
  return ::poll(&process, 1, 0) > 0;
}

void Group::await(const std::function<bool(int)>& ready, const Announcement& at) {
  const std::chrono::milliseconds timeout = timeout_;
  const auto begin = Clock::now();
  auto next_look = begin + kSlice;
  auto spin_until = begin + kSpin;
  for (int peer = 0; peer < identity_.size;) {
    const std::uint32_t bell = page(peer).bell.load();
    if (peer == identity_.rank || ready(peer)) {
      ++peer;
      continue;
    }
    check_failure(at);
    if (Clock::now() < spin_until) {
      ::sched_yield();
      continue;
    }
    const bool slice_over = sleep(peer, bell);
    const auto now = Clock::now();
    // Frequent changes by other events must not delay these checks.
    if (slice_over || now >= next_look) {
      look_around(ready, at);
      if (now - begin >= timeout) fail_if_late(ready, at, timeout);
      next_look = now + kSlice;
    } else {
      spin_until = now + kSpin;
    }
  }
}

bool Group::poll(const std::function<bool(int)>& ready, const Announcement& at) {
  for (int peer = 0; peer < identity_.size; ++peer) {
    if (peer == identity_.rank || ready(peer)) continue;
    check_failure(at);
    if (const auto now = Clock::now(); now >= next_look_) {
      next_look_ = now + kSlice;
      look_around(ready, at);
    }
    return false;
  }
  return true;
}

void Group::look_around(const std::function<bool(int)>& ready, const Announcement& at) {
  if (abort_check_) {
    try {
      abort_check_();
    } catch (const CommError& error) {
      fail_and_throw(at, error.what(), {}, error.rank());
    }
  }
  for (int peer = 0; peer < identity_.size; ++peer) {
    if (peer == identity_.rank) continue;
    const bool has_left = page(peer).left.load(std::memory_order_acquire) != 0;
    if (!has_left && !gone(peer)) continue;
    // A peer that is ready has done its part, even if it has ended since.
    if (ready(peer)) continue;
    check_failure(at);
    fail_and_throw(at, base::join(who(peer), has_left ? " has ended, " : " is gone, ", expected(at)),
                   "the output of that rank says why", identity_.rank_in_run(peer));
  }
}

void Group::fail_if_late(const std::function<bool(int)>& ready, const Announcement& at,
                         std::chrono::milliseconds timeout) {
  std::vector<int> late;
  std::string states;
  for (int rank = 0; rank < identity_.size; ++rank) {
    if (rank == identity_.rank || ready(rank)) continue;
    const std::uint64_t posted = page(rank).posted.load(std::memory_order_acquire);
    states += base::join(late.empty() ? "" : "; ", who(rank));
    if (posted == 0) {
      states += " has called nothing yet";
    } else if (posted < at.sequence) {
      states += base::join(" called ", call_of(announcement(rank, posted)).text(), " last, operation ", posted - 1);
    } else {
      states += " has come, and does not wait for it";
    }
    late.push_back(identity_.rank_in_run(rank));
  }
  if (late.empty()) return;  // they have just arrived
  fail_and_throw(at,
                 base::join("got nothing from ", ranks_text(late), " within ", duration_text(timeout), ", ",
                            expected(at), ": ", states),
                 "a rank hangs, or computes for longer than the limit; ZERO_TIMEOUT_S raises it",
                 late.size() == 1 ? late[0] : -1);
}

void Group::fail_for_other_call(const Announcement& at, int peer) {
  fail_and_throw(at,
                 base::join("got different calls, expected the same on every rank: ", who(peer), " calls ",
                            call_of(announcement(peer, at.sequence)).text(), ", ", who(identity_.rank), " calls ",
                            call_of(at).text()),
                 kSameCallsHint, -1);
}

void Group::check_failure(const Announcement& at) {
  if (failure_) throw_failure(at);
  const Failure& shared = page(0).failure;
  if (shared.state.load(std::memory_order_acquire) != Failure::Ready) return;
  failure_ = Known{text_of(shared.text, kTextBytes), text_of(shared.hint, kHintBytes), shared.rank};
  throw_failure(at);
}

std::optional<PeerFailure> Group::failure() const {
  const Failure& shared = page(0).failure;
  if (shared.state.load(std::memory_order_acquire) != Failure::Ready) return std::nullopt;
  return PeerFailure{shared.rank, text_of(shared.text, kTextBytes)};
}

void Group::throw_failure(const Announcement& at) const {
  const std::uint64_t operation = at.sequence - 1;  // counted from 0, as in all transports
  const int size = identity_.run_size > 0 ? identity_.run_size : identity_.size;
  throw CommError(
      at_call(op_name(at.op), failure_->text, identity_.rank_in_run(identity_.rank), size, operation, failure_->hint),
      failure_->rank);
}

void Group::fail(std::string_view text, std::string_view hint, int rank) noexcept {
  Failure& shared = page(0).failure;
  std::uint32_t expected = Failure::Empty;
  if (shared.state.compare_exchange_strong(expected, Failure::Writing)) {
    const auto write = [](char* to, std::string_view from, std::size_t most) { to[from.copy(to, most - 1)] = '\0'; };
    shared.rank = rank;
    write(shared.text, text, kTextBytes);
    write(shared.hint, hint, kHintBytes);
    shared.state.store(Failure::Ready, std::memory_order_release);
  }
  for (Page* each : pages_) {
    each->bell.fetch_add(1);
    futex(each->bell, FUTEX_WAKE, INT32_MAX, nullptr);
  }
}

void Group::fail_and_throw(const Announcement& at, std::string_view text, std::string_view hint, int rank) {
  fail(text, hint, rank);
  // Another rank may be writing the failure, or may have died while writing.
  const std::atomic<std::uint32_t>& state = page(0).failure.state;
  const auto until = Clock::now() + 100ms;
  while (state.load(std::memory_order_acquire) != Failure::Ready && Clock::now() < until) ::sched_yield();
  check_failure(at);
  failure_ = Known{std::string(text), std::string(hint), rank};
  throw_failure(at);
}

std::string Group::who(int peer) const { return base::join(identity_.name_of(peer), " (pid ", pids_[peer], ")"); }

std::string Group::expected(const Announcement& at) const {
  return base::join("expected ", call_of(at).text(), " from all ", identity_.size, " ranks");
}

}  // namespace zero::comm::shm
