// What ranks read of each other to coordinate, at fixed layouts in shared memory: counters and announcements of
// operations, bells, and one failure record for all.
//
// [Note: order of memory] Plain fields of an Announcement, and the payload, are written before a release-store of
// Page::posted (or reduced, finished) and read after an acquire-load of it. An announcement's slot is reused kRing
// operations later, when every peer has finished the old one.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "comm/collective_call.h"
#include "comm/shm/shared_pieces.h"

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

// One rank in one group. Initially zero.
struct Page {
  // Number of operations that this rank has announced; whose sum it has written (all_reduce); and for which it has read
  // everything it needs from its peers.
  alignas(64) std::atomic<std::uint64_t> posted, reduced, finished;
  alignas(64) Announcement ring[kRing];
};

// Where in a rank's arena its page of a group is, and the counter that says when the rank has left that group.
struct PagePlace {
  std::uint64_t page = 0, left = 0, left_begin = 0;
};

// The failure of all ranks; the first one wins. Only rank 0's record is used.
struct Failure {
  enum State : std::uint32_t { Empty, Writing, Ready };
  std::atomic<std::uint32_t> state;
  std::int32_t rank;  // of the run; -1: not one rank alone
  char text[kTextBytes];
  char hint[kHintBytes];
};

// The start of every rank's arena. Initially zero.
struct HostPage {
  // A futex, incremented with every change of this rank's pages and counters. `sleepers` ranks wait on it.
  alignas(64) std::atomic<std::uint32_t> bell;
  std::atomic<std::uint32_t> sleepers;
  alignas(64) Failure failure;
  // Of the group of all ranks.
  alignas(64) Epoch::Number left;
  Page page;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace zero::comm::shm
