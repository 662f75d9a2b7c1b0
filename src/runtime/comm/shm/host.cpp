#include "comm/shm/host.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <new>

#include <zero/errors.h>

namespace zero::comm::shm {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

int futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* timeout) {
  auto* const plain = reinterpret_cast<std::uint32_t*>(&word);
  return static_cast<int>(::syscall(SYS_futex, plain, operation, value, timeout, nullptr, 0));
}

}  // namespace

Host::Host(const net::ProcessInfo& identity, std::chrono::milliseconds timeout, std::function<void()> abort_check,
           Mappings* mappings)
    : me_(identity.rank),
      abort_check_(std::move(abort_check)),
      arena_(std::make_shared<Arena>(default_capacity(identity.size), sizeof(HostPage), mappings)) {
  for (Member& member : rendezvous(identity, arena_->fd(), timeout, abort_check_)) {
    const bool own = static_cast<int>(pids_.size()) == me_;
    pids_.push_back(member.pid);
    processes_.push_back(std::move(member.process));
    const int memory = member.memory.get();
    mappings_.push_back(own ? nullptr : mappings != nullptr ? mappings->of(memory) : std::make_shared<Mapping>(memory));
    bases_.push_back(own ? arena_->base() : mappings_.back()->base());
  }
  arena_->close_fd();
  pieces_ = std::make_unique<SharedPieces>(*this);
}

Host::~Host() = default;

// The mapping is zero-initialized, which is valid for every field.
HostPage& Host::page(int rank) const {
  return *std::launder(reinterpret_cast<HostPage*>(const_cast<std::byte*>(base(rank))));
}

bool Host::gone(int rank) const {
  const auto& process = processes_[static_cast<std::size_t>(rank)];
  if (!process) return ::kill(pid(rank), 0) != 0 && errno == ESRCH;  // a kernel before 5.3
  pollfd entry{process.get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

void Host::ring() {
  // Sequentially consistent, as in sleep(): either this sees the sleeper, or the sleeper sees the new value.
  HostPage& mine = page(me_);
  mine.bell.fetch_add(1);
  if (mine.sleepers.load() != 0) futex(mine.bell, FUTEX_WAKE, INT_MAX, nullptr);
}

bool Host::sleep(int rank, std::uint32_t bell, std::chrono::nanoseconds time) {
  HostPage& other = page(rank);
  const timespec slice{0, time.count()};
  other.sleepers.fetch_add(1);
  const int result = futex(other.bell, FUTEX_WAIT, bell, &slice);
  const bool over = result != 0 && errno == ETIMEDOUT;
  other.sleepers.fetch_sub(1);
  return over;
}

void Host::fail(std::string_view text, std::string_view hint, int rank) noexcept {
  Failure& shared = page(0).failure;
  std::uint32_t expected = Failure::Empty;
  if (shared.state.compare_exchange_strong(expected, Failure::Writing)) {
    const auto write = [](char* to, std::string_view from, std::size_t most) { to[from.copy(to, most - 1)] = '\0'; };
    shared.rank = rank;
    write(shared.text, text, kTextBytes);
    write(shared.hint, hint, kHintBytes);
    shared.state.store(Failure::Ready, std::memory_order_release);
  }
  // Another rank may be writing the failure, or may have died while writing.
  const auto until = Clock::now() + 100ms;
  while (failure() == nullptr && Clock::now() < until) ::sched_yield();
  for (int each = 0; each < static_cast<int>(bases_.size()); ++each) {
    page(each).bell.fetch_add(1);
    futex(page(each).bell, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

const Failure* Host::failure() const {
  const Failure& shared = page(0).failure;
  return shared.state.load(std::memory_order_acquire) == Failure::Ready ? &shared : nullptr;
}

PagePlace Host::offer() {
  if (!offer_) {
    auto* const memory = arena_->take(sizeof(Page));
    new (memory) Page{};
    const Epoch left = pieces_->begin();
    offer_ = PagePlace{arena_->offset(memory), arena_->offset(left.number), left.begin};
  }
  return *offer_;
}

PagePlace Host::take_offer() {
  const PagePlace taken = offer();
  offer_.reset();
  return taken;
}

PagePlace Host::first_page() { return {offsetof(HostPage, page), offsetof(HostPage, left), 0}; }

}  // namespace zero::comm::shm
