// One rank of a group over shared memory (transport.cpp): its operations in flight, what it announces to its peers, and
// what it reads of them. begin() makes the input readable and announces it; complete() reads the peers' inputs in
// place.
//
// [Note: order of completion] Operations complete in order of issue: waiting for one completes all earlier ones.
// Therefore no rank can delay the second phase of an earlier operation by waiting for a later one, and Page::finished
// is a single number.
//
// [Note: staging] An input is copied to a staging piece, which is free again when every peer has finished the
// operation, so wait() only waits for announcements. A large input in this rank's arena is read in place ("direct");
// then wait() also waits for the readers, because the owner may overwrite it afterwards.
//
// [Note: waits over groups] Peers may wait in one group for a second phase, or for the reading, of an operation that
// this rank has begun, while this rank waits in another group, over shared memory or TCP. So such waits advance the
// operations of the rank's other groups. A Rank lets in one caller at a time, and advance() returns if there is one.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/collective_call.h"
#include "comm/shm/arena.h"
#include "comm/shm/group.h"
#include "comm/shm/host.h"
#include "comm/shm/mapped_buffer.h"
#include "comm/shm/reduce_segments.h"
#include "comm/shm/shared_pieces.h"
#include "comm/shm/staging.h"
#include "comm/shm/turns.h"
#include "comm/transport.h"
#include "kernels/elementwise.h"

namespace zero::comm::shm {

struct Operation {
  enum class Phase { Announced, Reduced, Read, Complete };

  Announcement announced;
  at::Tensor out, in;  // all_reduce, broadcast: the same tensor
  PeerReduce scattered;
  Parts parts;  // of an all_to_all
  bool direct = false;
  bool has_own_part = false;  // of an all_gather
  std::atomic<Phase> phase = Phase::Announced;
  std::vector<std::string> messages;  // of all_gather_bytes
};

struct Slice {
  std::size_t at = 0, bytes = 0;
  std::int64_t numel = 0;
};

// The payload of an all_to_all begins with one per rank: where in the sender's arena that rank's part is.
struct PartPlace {
  std::uint64_t offset = 0, bytes = 0;
};

// Works may keep it alive after the transport.
class Rank {
 public:
  // The ranks of `host` that are `members`, with their pages; this rank's own one is taken from the host.
  Rank(const net::ProcessInfo& identity, const std::shared_ptr<Host>& host, std::vector<int> members,
       const std::vector<PagePlace>& pages);
  // All ranks of the host.
  Rank(const net::ProcessInfo& identity, const std::shared_ptr<Host>& host);
  ~Rank();

  std::shared_ptr<Operation> begin(Op op, at::Tensor out, at::Tensor in, int root, std::string_view of);
  std::shared_ptr<Operation> begin(at::Tensor out, at::Tensor in, Parts parts);
  std::shared_ptr<Operation> begin(PeerReduce sum);
  std::vector<std::string> all_gather_bytes(std::string_view message);
  void complete(const Operation& operation);
  bool try_complete(const Operation& operation);
  // Takes the operations in flight as far as they go without waiting. Returns whether there are any left.
  bool advance();
  void on_wait(std::function<bool()> advance_others) { group_->on_wait(std::move(advance_others)); }
  const std::shared_ptr<Host>& host() const { return host_; }
  const std::vector<int>& members() const { return group_->members(); }
  VectorPlace place() {
    return {host_->arena(), group_, host_->pieces(), &identity_,
            [this](std::string_view message) { return all_gather_bytes(message); }};
  }
  void set_timeout(std::chrono::milliseconds timeout) { group_->set_timeout(timeout); }

 private:
  using Ready = std::function<bool(int)>;

  Rank(const std::shared_ptr<Host>& host, std::shared_ptr<Group> group, const net::ProcessInfo& identity,
       std::byte* page);
  void complete_here(const Operation& operation);
  bool try_complete_here(const Operation& operation);
  std::shared_ptr<Operation> prepare(Op op, at::Tensor out, at::Tensor in);
  bool readable_in_place(const at::Tensor& tensor, std::size_t bytes) const;
  void make_room(Announcement& mine);
  void publish(const std::shared_ptr<Operation>& operation, Staging staging);
  Staging stage(Operation& operation);
  bool advance(Operation& operation, bool blocking);
  bool reached(std::atomic<std::uint64_t> Page::*counter, int peer, std::uint64_t sequence) const {
    return (group_->page(peer).*counter).load(std::memory_order_acquire) >= sequence;
  }
  bool all(const Ready& ready, const Operation& operation, bool blocking);
  void check_agreement(const Operation& operation);
  void read(Operation& operation);
  void read_parts(Operation& operation);
  void gather(Operation& operation, bool own, bool others);
  void reduce_slice(Operation& operation);
  void finish_reading(Operation& operation);
  void recycle();

  // The data of peer `from` for this rank in a reduce_scatter.
  const std::byte* part_for_me(const Operation& operation, int from, std::size_t bytes) const;
  const std::byte* payload(const Operation& operation, int from) const {
    return group_->base(from) + group_->announcement(from, operation.announced.sequence).offset;
  }
  Places places(const Operation& operation) const;
  Slice slice(const at::Tensor& tensor, int rank) const;
  // See [Note: large results].
  kernels::Stores stores(const Operation& operation) const;
  bool one_phase(const Operation& operation) const;

  const net::ProcessInfo identity_;
  const int me_, size_;
  const pid_t pid_;
  const std::shared_ptr<Host> host_;
  const std::shared_ptr<Arena> arena_;
  const std::shared_ptr<SharedPieces> pieces_;
  const std::shared_ptr<Group> group_;
  std::byte* const page_;  // from the arena; null: part of the host's
  Turns turns_;
  std::uint64_t sequence_ = 0;
  std::deque<std::shared_ptr<Operation>> pending_;
  StagingPieces staging_;
};

}  // namespace zero::comm::shm
