// Coordination of the ranks of one host without messages: one page per rank with counters, announcements of operations
// and a futex, and one failure record for all. A Group waits on the peers' pages and turns death, departure, delay and
// mismatched calls into errors that name the rank. It moves no payload and does not know tensors.
//
// [Note: order of memory] Plain fields of an Announcement, and the payload, are written before a release-store of
// Page::posted (or reduced, finished) and read after an acquire-load of it. An announcement's slot is reused kRing
// operations later, when every peer has finished the old one.
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/collective_call.h"
#include "comm/shm/rendezvous.h"

namespace zero::comm::shm {

enum class Op : std::uint32_t { None, AllGather, ReduceScatter, AllReduce, Broadcast, AllToAll, Exchange, Scattered };
// The description of one operation by one rank.
struct Announcement {
  std::uint64_t sequence = 0;
  Op op = Op::None;
  std::int32_t dtype = 0;  // at::ScalarType
  std::int64_t numel = 0;  // of the larger side; 0 for all_gather_bytes
  std::int32_t root = -1;
  std::uint32_t without_own = 0;        // 1: the payload omits this rank's own part
  std::uint64_t offset = 0, bytes = 0;  // this rank's payload in its arena
  std::uint64_t of_hash = 0;            // of the name of what an all_gather gathers
  char of[48] = {};                     // the end of that name, for messages
  void set_of(std::string_view name);
};

// "all_gather"; and the call as in the messages of all transports.
const char* op_name(Op op);
Call call_of(const Announcement& announcement);

constexpr std::uint64_t kRing = 128;
constexpr std::size_t kTextBytes = 1024, kHintBytes = 256;

// The failure of the whole group; the first one wins. Only rank 0's record is used.
struct Failure {
  enum State : std::uint32_t { Empty, Writing, Ready };
  std::atomic<std::uint32_t> state;
  std::int32_t rank;  // -1: not one rank alone
  char text[kTextBytes];
  char hint[kHintBytes];
};

// At the start of every rank's arena. Initially zero.
struct Page {
  // Number of operations that this rank has announced; whose sum it has written (all_reduce); and for which it has read
  // everything it needs from its peers.
  alignas(64) std::atomic<std::uint64_t> posted, reduced, finished;
  std::atomic<std::uint32_t> left;  // 1: its transport was destroyed
  // A futex, incremented with every change above. `sleepers` ranks wait on it.
  alignas(64) std::atomic<std::uint32_t> bell;
  std::atomic<std::uint32_t> sleepers;
  alignas(64) Announcement ring[kRing];
  alignas(64) Failure failure;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

class Group {
 public:
  // Pages by rank; `mine` is this rank's arena. Peers are mapped through `mappings` if given. abort_check, if given, is
  // called repeatedly while waiting; a CommError of it becomes the group's failure.
  Group(const net::ProcessInfo& identity, Arena& mine, std::vector<Member> members,
        std::function<void()> abort_check = nullptr, Mappings* mappings = nullptr);
  ~Group();

  Page& page(int rank) const { return *pages_[rank]; }
  Page& mine() const { return *pages_[identity_.rank]; }
  const std::byte* base(int rank) const { return bases_[rank]; }
  const Announcement& announcement(int rank, std::uint64_t sequence) const { return page(rank).ring[sequence % kRing]; }

  // Blocks until `ready(peer)` holds for every peer; it may only read the peer's page. `at` is this rank's operation.
  // CommError: the group's failure, a peer that died or left, or, after the timeout, the ranks that are late. The error
  // is recorded for all ranks.
  void await(const std::function<bool(int peer)>& ready, const Announcement& at);
  // Whether that holds, without blocking. A failure, or a peer that died or left, is a CommError as in await(); being
  // late is not.
  bool poll(const std::function<bool(int peer)>& ready, const Announcement& at);
  // Timeout of all later waits, including those of symmetric buffers.
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  // Wakes the ranks that wait for this one.
  void ring();
  // Throws the group's failure, if there is one. A failure is permanent.
  void check_failure(const Announcement& at);
  // Records a failure for all ranks, unless one exists, and wakes them. `rank` is a rank of the run. Thread-safe.
  void fail(std::string_view text, std::string_view hint, int rank) noexcept;
  // The same, then throws the recorded failure.
  [[noreturn]] void fail_and_throw(const Announcement& at, std::string_view text, std::string_view hint, int rank);
  // The recorded failure.
  std::optional<PeerFailure> failure() const;
  // Called by both ranks when their operations differ.
  [[noreturn]] void fail_for_other_call(const Announcement& at, int peer);

 private:
  bool sleep(int peer, std::uint32_t bell);
  bool gone(int peer) const;
  void look_around(const std::function<bool(int)>& ready, const Announcement& at);
  void fail_if_late(const std::function<bool(int)>& ready, const Announcement& at, std::chrono::milliseconds timeout);
  [[noreturn]] void throw_failure(const Announcement& at) const;
  std::string who(int peer) const;  // "rank 2 (pid 123)"
  std::string expected(const Announcement& at) const;

  const net::ProcessInfo identity_;
  const std::function<void()> abort_check_;
  std::atomic<std::chrono::milliseconds> timeout_{std::chrono::minutes(30)};
  std::chrono::steady_clock::time_point next_look_{};  // of poll()
  std::vector<pid_t> pids_;
  std::vector<base::Descriptor> processes_;
  std::vector<std::shared_ptr<Mapping>> mappings_;  // none for this rank
  std::vector<Page*> pages_;
  std::vector<const std::byte*> bases_;
  struct Known {
    std::string text, hint;
    int rank = -1;
  };
  std::optional<Known> failure_;
};

}  // namespace zero::comm::shm
