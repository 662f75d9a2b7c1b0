// Waits with a short spin, then on a futex in time slices, so that a dead peer is detected soon. Manages the first
// failure of the group, which all ranks report with the same text.
#include "comm/shm/group.h"

#include <sched.h>

#include <algorithm>
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
// With operations of other groups in flight: another rank than the one waited for may let them advance.
constexpr auto kShortSlice = 1ms;

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

Group::Group(const net::ProcessInfo& identity, std::shared_ptr<Host> host, std::vector<int> members,
             const std::vector<PagePlace>& places)
    : identity_(identity), host_(std::move(host)), members_(std::move(members)) {
  for (int rank = 0; rank < identity.size; ++rank) {
    const PagePlace& place = places[static_cast<std::size_t>(rank)];
    auto* const start = const_cast<std::byte*>(base(rank));
    pages_.push_back(std::launder(reinterpret_cast<Page*>(start + place.page)));
    left_.push_back({std::launder(reinterpret_cast<Epoch::Number*>(start + place.left)), place.left_begin});
  }
  auto peers = left_;
  peers.erase(peers.begin() + identity_.rank);
  peers_ = std::make_shared<const std::vector<Epoch>>(std::move(peers));
}

void Group::await(const std::function<bool(int)>& ready, const Announcement& at) {
  const std::chrono::milliseconds timeout = timeout_;
  const auto begin = Clock::now();
  auto next_look = begin + kSlice;
  auto spin_until = begin + kSpin;
  for (int peer = 0; peer < identity_.size;) {
    const std::uint32_t bell = host_->bell(on_host(peer));
    if (peer == identity_.rank || ready(peer)) {
      ++peer;
      continue;
    }
    check_failure(at);
    const bool others = advance_others_ && advance_others_();
    if (Clock::now() < spin_until) {
      ::sched_yield();
      continue;
    }
    const bool slice_over = host_->sleep(on_host(peer), bell, others ? kShortSlice : kSlice);
    const auto now = Clock::now();
    // Frequent changes by other events must not delay these checks.
    if ((slice_over && !others) || now >= next_look) {
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
  try {
    host_->check_abort();
  } catch (const CommError& error) {
    fail_and_throw(at, error.what(), {}, error.rank());
  }
  for (int peer = 0; peer < identity_.size; ++peer) {
    if (peer == identity_.rank) continue;
    const bool has_left = left_[static_cast<std::size_t>(peer)].gone();
    if (!has_left && !host_->gone(on_host(peer))) continue;
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
  if (const Failure* failure = host_->failure())
    throw_failure(at, {text_of(failure->text, kTextBytes), text_of(failure->hint, kHintBytes), failure->rank});
}

void Group::throw_failure(const Announcement& at, const Known& failure) const {
  const std::uint64_t operation = at.sequence - 1;  // counted from 0, as in all transports
  const int size = identity_.run_size > 0 ? identity_.run_size : identity_.size;
  throw CommError(
      at_call(op_name(at.op), failure.text, identity_.rank_in_run(identity_.rank), size, operation, failure.hint),
      failure.rank);
}

void Group::fail_and_throw(const Announcement& at, std::string_view text, std::string_view hint, int rank) {
  host_->fail(text, hint, rank);
  check_failure(at);
  throw_failure(at, {std::string(text), std::string(hint), rank});
}

std::string Group::who(int peer) const {
  return base::join(identity_.name_of(peer), " (pid ", host_->pid(on_host(peer)), ")");
}

std::string Group::expected(const Announcement& at) const {
  return base::join("expected ", call_of(at).text(), " from all ", identity_.size, " ranks");
}

}  // namespace zero::comm::shm
