// The transport for processes of one host: collectives over memory that every rank can read. begin() makes the input
// readable and announces it, wait() reads the peers' inputs in place. No helper threads, no messages. This file defines
// the order of reads and writes. Other files of this folder implement waiting and failures, memory, rendezvous,
// reductions of tensor segments, and symmetric buffers.
//
// [Note: order of completion] Operations complete in order of issue: waiting for one completes all earlier ones.
// Therefore no rank can delay the second phase of an earlier operation by waiting for a later one, and Page::finished
// is a single number.
//
// [Note: staging] An input is copied to a staging piece, which is free again when every peer has finished the
// operation, so wait() only waits for announcements. A large input in this rank's arena is read in place ("direct");
// then wait() also waits for the readers, because the owner may overwrite it afterwards.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "base/check.h"
#include "comm/collective_call.h"
#include "comm/shm/arena.h"
#include "comm/shm/copy.h"
#include "comm/shm/group.h"
#include "comm/shm/mapped_buffer.h"
#include "comm/shm/reduce_segments.h"
#include "comm/shm/rendezvous.h"
#include "comm/shm/shared_pieces.h"
#include "comm/shm/staging.h"
#include "comm/transport.h"
#include "kernels/elementwise.h"

namespace zero::comm {
namespace {

using shm::Announcement;
using shm::Arena;
using shm::Op;
using shm::Staging;
using shm::StagingPieces;

// From this size on, an input in the arena is read in place.
constexpr std::size_t kDirectBytes = 64 << 10;
// Up to this size, every rank computes the whole sum of an all_reduce: one wait instead of two.
constexpr std::size_t kOnePhaseBytes = 16 << 10;
// Slices of an all_reduce begin at multiples of this many elements, so that no two ranks write to one cache line.
constexpr std::int64_t kSliceNumel = 64;

void copy(std::byte* to, const std::byte* from, std::size_t bytes, kernels::Stores stores = kernels::Stores::Cached) {
  if (bytes > 0) kernels::copy(to, from, static_cast<std::int64_t>(bytes), stores);
}

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

struct Operation {
  enum class Phase { Announced, Reduced, Read, Complete };

  Announcement announced;
  at::Tensor out, in;  // all_reduce, broadcast: the same tensor
  PeerReduce scattered;
  bool direct = false;
  bool has_own_part = false;  // of an all_gather
  Phase phase = Phase::Announced;
  std::vector<std::string> messages;  // of all_gather_bytes
};

struct Slice {
  std::size_t at = 0, bytes = 0;
  std::int64_t numel = 0;
};

// The state of a rank. Works may keep it alive after the transport.
class Rank {
 public:
  Rank(const net::ProcessInfo& identity, std::chrono::milliseconds timeout, const std::function<void()>& abort_check,
       shm::Mappings* mappings)
      : identity_(identity),
        me_(identity.rank),
        size_(identity.size),
        pid_(::getpid()),
        arena_(std::make_shared<Arena>(shm::default_capacity(identity.size), sizeof(shm::Page), mappings)),
        group_(std::make_shared<shm::Group>(
            identity, *arena_, shm::rendezvous(identity, arena_->fd(), timeout, abort_check), abort_check, mappings)),
        pieces_(std::make_shared<shm::SharedPieces>(arena_, group_)),
        staging_(arena_) {
    arena_->close_fd();
  }

  ~Rank() {
    if (::getpid() != pid_) return;  // a forked child must not change memory that it shares with the rank
    // Peers may still read announced data.
    recycle();
    staging_.leave();
    for (const auto& operation : pending_) {
      if (operation->direct && operation->in.defined()) arena_->pin(bytes_of(operation->in));
      for (const auto& stretch : operation->scattered.vector) arena_->pin(bytes_of(stretch.data));
    }
    group_->mine().left.store(1, std::memory_order_release);
    group_->ring();
  }

  std::shared_ptr<Operation> begin(Op op, at::Tensor out, at::Tensor in, int root, std::string_view of);
  std::shared_ptr<Operation> begin(PeerReduce sum);
  std::vector<std::string> all_gather_bytes(std::string_view message);
  void complete(const Operation& operation);
  bool try_complete(const Operation& operation);
  void stop(const std::string& reason, int rank) noexcept { group_->fail(reason, {}, rank); }
  std::optional<PeerFailure> failure() const { return group_->failure(); }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  shm::VectorPlace place() {
    return {arena_, group_, pieces_, &identity_,
            [this](std::string_view message) { return all_gather_bytes(message); }};
  }
  void set_timeout(std::chrono::milliseconds timeout) { group_->set_timeout(timeout); }

 private:
  using Ready = std::function<bool(int)>;

  void make_room(Announcement& mine);
  void publish(const std::shared_ptr<Operation>& operation, Staging staging);
  Staging stage(Operation& operation);
  bool advance(Operation& operation, bool blocking);
  bool reached(std::atomic<std::uint64_t> shm::Page::*counter, int peer, std::uint64_t sequence) const {
    return (group_->page(peer).*counter).load(std::memory_order_acquire) >= sequence;
  }
  bool all(const Ready& ready, const Operation& operation, bool blocking);
  void check_agreement(const Operation& operation);
  void read(Operation& operation);
  void gather(Operation& operation, bool own, bool others);
  void reduce_slice(Operation& operation);
  void finish_reading(Operation& operation);
  void recycle();

  // The data of peer `from` for rank `to`, if payloads consist of equal parts per rank.
  const std::byte* part(const Operation& operation, int from, int to, std::size_t bytes) const {
    if (from == me_) return bytes_of(operation.in) + to * bytes;
    const Announcement& theirs = group_->announcement(from, operation.announced.sequence);
    const int place = theirs.without_own != 0 && to > from ? to - 1 : to;
    return payload(operation, from) + place * bytes;
  }
  const std::byte* payload(const Operation& operation, int from) const {
    return group_->base(from) + group_->announcement(from, operation.announced.sequence).offset;
  }
  shm::Places places(const Operation& operation) const {
    const std::size_t count = operation.scattered.vector.size();
    shm::Places places(size_, std::vector<const std::byte*>(count));
    for (int rank = 0; rank < size_; ++rank) {
      const auto* offsets = reinterpret_cast<const std::uint64_t*>(payload(operation, rank));
      for (std::size_t i = 0; i < count; ++i) places[rank][i] = group_->base(rank) + offsets[i];
    }
    return places;
  }
  Slice slice(const at::Tensor& tensor, int rank) const {
    const std::int64_t numel = tensor.numel();
    const std::int64_t per_rank = ((numel + size_ - 1) / size_ + kSliceNumel - 1) / kSliceNumel * kSliceNumel;
    const std::int64_t first = std::min(rank * per_rank, numel), last = std::min(first + per_rank, numel);
    const std::size_t element = tensor.element_size();
    return {first * element, (last - first) * element, last - first};
  }
  // See [Note: large results].
  kernels::Stores stores(const Operation& operation) const {
    return shm::stores_for(std::max(operation.in.nbytes(), operation.out.nbytes()), size_);
  }
  bool one_phase(const Operation& operation) const { return size_ == 1 || operation.in.nbytes() <= kOnePhaseBytes; }

  const net::ProcessInfo identity_;
  const int me_, size_;
  const pid_t pid_;
  std::shared_ptr<Arena> arena_;
  std::shared_ptr<shm::Group> group_;
  std::shared_ptr<shm::SharedPieces> pieces_;
  std::uint64_t sequence_ = 0;
  std::deque<std::shared_ptr<Operation>> pending_;
  StagingPieces staging_;
};

std::shared_ptr<Operation> Rank::begin(Op op, at::Tensor out, at::Tensor in, int root, std::string_view of) {
  auto operation = std::make_shared<Operation>();
  operation->out = std::move(out);
  operation->in = std::move(in);
  if (!operation->in.is_cpu()) {
    throw ConfigError(base::join("[Communicator::", shm::op_name(op), "] got a tensor on ",
                                 operation->in.device().str(), ", expected CPU memory (", identity_.place(),
                                 "). Hint: ZERO_TRANSPORT=nccl is for tensors of GPUs."));
  }
  Announcement& mine = operation->announced;
  mine.op = op;
  mine.dtype = static_cast<std::int32_t>(operation->in.scalar_type());
  mine.numel = std::max(operation->out.numel(), operation->in.numel());
  mine.root = root;
  mine.set_of(of);
  make_room(mine);
  const bool gives = root < 0 || root == me_;
  const std::size_t bytes = gives ? operation->in.nbytes() : 0;
  operation->direct = bytes >= kDirectBytes && size_ > 1 && arena_->holds(bytes_of(operation->in), bytes);
  Staging staging;
  if (operation->direct) {
    mine.offset = arena_->offset(bytes_of(operation->in));
    mine.bytes = bytes;
  } else if (bytes > 0 && size_ > 1) {
    staging = stage(*operation);
  }
  publish(operation, staging);
  return operation;
}

// Announces the address of each segment to the peers.
std::shared_ptr<Operation> Rank::begin(PeerReduce sum) {
  auto operation = std::make_shared<Operation>();
  Announcement& mine = operation->announced;
  mine.op = Op::Scattered;
  mine.dtype = static_cast<std::int32_t>(sum.vector[0].data.scalar_type());
  mine.numel = sum.shard_numel * size_;
  make_room(mine);
  mine.bytes = sum.vector.size() * sizeof(std::uint64_t);
  const Staging staging = staging_.take(mine.bytes);
  auto* const offsets = reinterpret_cast<std::uint64_t*>(staging.piece);
  for (std::size_t i = 0; i < sum.vector.size(); ++i) {
    const auto& data = sum.vector[i].data;
    ZERO_CHECK(arena_->holds(bytes_of(data), data.nbytes()), "stretch ", i, " lies outside shared memory");
    offsets[i] = arena_->offset(bytes_of(data));
  }
  mine.offset = arena_->offset(staging.piece);
  operation->direct = true;
  operation->scattered = std::move(sum);
  publish(operation, staging);
  return operation;
}

std::vector<std::string> Rank::all_gather_bytes(std::string_view message) {
  auto operation = std::make_shared<Operation>();
  operation->announced.op = Op::Exchange;
  make_room(operation->announced);
  operation->announced.bytes = message.size();
  Staging staging;
  if (!message.empty() && size_ > 1) {
    staging = staging_.take(message.size());
    copy(staging.piece, reinterpret_cast<const std::byte*>(message.data()), message.size());
    operation->announced.offset = arena_->offset(staging.piece);
  }
  operation->messages.resize(size_);
  operation->messages[me_] = message;
  publish(operation, staging);
  complete(*operation);
  return std::move(operation->messages);
}

// This slot was used kRing operations ago; waits until all ranks have finished that operation.
void Rank::make_room(Announcement& mine) {
  const std::uint64_t next = mine.sequence = sequence_ + 1;
  group_->check_failure(mine);
  while (!pending_.empty() && pending_.front()->announced.sequence + shm::kRing <= next) {
    complete(*pending_.front());
  }
  if (next > shm::kRing) {
    const std::uint64_t old = next - shm::kRing;
    group_->await([&](int peer) { return reached(&shm::Page::finished, peer, old); }, mine);
  }
  recycle();
}

// Copies the data for the peers into a new staging piece.
Staging Rank::stage(Operation& operation) {
  Announcement& mine = operation.announced;
  const at::Tensor& in = operation.in;
  const std::byte* from = bytes_of(in);
  const bool equal_parts = mine.op == Op::ReduceScatter || mine.op == Op::AllToAll;
  const bool sliced = mine.op == Op::AllReduce && !one_phase(operation);
  Slice own;  // the peers do not read it
  if (equal_parts) own = {me_ * (in.nbytes() / size_), in.nbytes() / size_, 0};
  if (sliced) own = slice(in, me_);
  mine.without_own = equal_parts;
  mine.bytes = equal_parts ? in.nbytes() - own.bytes : in.nbytes();
  const Staging staging = staging_.take(mine.bytes);
  const std::size_t end = own.at + own.bytes;
  copy(staging.piece, from, own.at);
  copy(staging.piece + (equal_parts ? own.at : end), from + end, in.nbytes() - end);
  mine.offset = arena_->offset(staging.piece);
  return staging;
}

void Rank::publish(const std::shared_ptr<Operation>& operation, Staging staging) {
  ++sequence_;
  staging.sequence = sequence_;
  if (staging.piece != nullptr) staging_.lend(staging);
  group_->mine().ring[sequence_ % shm::kRing] = operation->announced;
  pending_.push_back(operation);
  group_->mine().posted.store(sequence_, std::memory_order_release);
  if (size_ > 1) group_->ring();
}

void Rank::complete(const Operation& operation) {
  while (operation.phase != Operation::Phase::Complete) {
    const std::shared_ptr<Operation> first = pending_.front();
    while (!advance(*first, true)) {
    }
    pending_.pop_front();
  }
}

bool Rank::try_complete(const Operation& operation) {
  while (operation.phase != Operation::Phase::Complete) {
    const std::shared_ptr<Operation> first = pending_.front();
    group_->check_failure(first->announced);
    while (first->phase != Operation::Phase::Complete) {
      const auto before = first->phase;
      if (!advance(*first, false) && first->phase == before) return false;
    }
    pending_.pop_front();
  }
  return true;
}

// Whether all peers are ready; blocking: waits until they are.
bool Rank::all(const Ready& ready, const Operation& operation, bool blocking) {
  if (blocking) {
    group_->await(ready, operation.announced);
    return true;
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != me_ && !ready(peer)) return false;
  }
  return true;
}

// Advances by one phase if the peers are ready (blocking: waits for them). Returns whether the operation is complete.
bool Rank::advance(Operation& operation, bool blocking) {
  using Phase = Operation::Phase;
  const std::uint64_t sequence = operation.announced.sequence;
  const int root = operation.announced.root;
  switch (operation.phase) {
    case Phase::Announced: {
      const auto posted = [&](int peer) {
        const bool gives = root < 0 || peer == root;
        return !gives || reached(&shm::Page::posted, peer, sequence);
      };
      if (operation.announced.op == Op::AllGather && !operation.has_own_part) {
        operation.has_own_part = stores(operation) == kernels::Stores::Cached;
        if (operation.has_own_part) gather(operation, true, false);  // before the wait, which it shortens
      }
      if (!all(posted, operation, blocking)) return false;
      check_agreement(operation);
      if (operation.announced.op == Op::Scattered) {
        shm::sum_own_part(operation.scattered, places(operation), me_);
        if (!operation.scattered.to_all) {
          finish_reading(operation);
          break;
        }
      }
      if (operation.announced.op == Op::Scattered ||
          (operation.announced.op == Op::AllReduce && !one_phase(operation))) {
        if (operation.announced.op == Op::AllReduce) reduce_slice(operation);
        group_->mine().reduced.store(sequence, std::memory_order_release);
        if (size_ > 1) group_->ring();
        operation.phase = Phase::Reduced;
        return false;
      }
      read(operation);
      finish_reading(operation);
      break;
    }
    case Phase::Reduced: {
      const auto reduced = [&](int peer) { return reached(&shm::Page::reduced, peer, sequence); };
      if (!all(reduced, operation, blocking)) return false;
      if (operation.announced.op == Op::Scattered) {
        shm::copy_other_parts(operation.scattered, places(operation), me_);
        finish_reading(operation);
        break;
      }
      std::byte* const out = bytes_of(operation.out);
      for (int rank = 0; rank < size_; ++rank) {
        const Slice piece = slice(operation.out, rank);
        if (rank != me_ || !operation.direct) copy(out + piece.at, payload(operation, rank) + piece.at, piece.bytes);
      }
      finish_reading(operation);
      break;
    }
    case Phase::Read: {
      const auto finished = [&](int peer) { return reached(&shm::Page::finished, peer, sequence); };
      if (!all(finished, operation, blocking)) return false;
      operation.phase = Phase::Complete;
      break;
    }
    case Phase::Complete:
      break;
  }
  if (operation.phase == Phase::Complete) {
    operation.in = operation.out = at::Tensor();
    operation.scattered = {};
    return true;
  }
  return false;
}

void Rank::check_agreement(const Operation& operation) {
  const Announcement& mine = operation.announced;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == me_ || !reached(&shm::Page::posted, peer, mine.sequence)) continue;
    const Announcement& theirs = group_->announcement(peer, mine.sequence);
    const bool same = theirs.op == mine.op && theirs.dtype == mine.dtype && theirs.numel == mine.numel &&
                      (mine.op != Op::Scattered || theirs.bytes == mine.bytes);
    if (!same || theirs.root != mine.root || theirs.of_hash != mine.of_hash) group_->fail_for_other_call(mine, peer);
  }
}

void Rank::gather(Operation& operation, bool own, bool others) {
  std::vector<const std::byte*> parts(size_);
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == me_ ? own : others) parts[rank] = rank == me_ ? bytes_of(operation.in) : payload(operation, rank);
  }
  shm::gather_parts(bytes_of(operation.out), parts, operation.in.nbytes(), me_, stores(operation));
}

void Rank::read(Operation& operation) {
  const Announcement& mine = operation.announced;
  if (mine.op == Op::Exchange) {
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == me_) continue;
      operation.messages[rank].assign(reinterpret_cast<const char*>(payload(operation, rank)),
                                      group_->announcement(rank, mine.sequence).bytes);
    }
    return;
  }
  std::byte* const out = bytes_of(operation.out);
  const std::size_t out_bytes = operation.out.nbytes();
  std::vector<const void*> parts(size_);
  switch (mine.op) {
    case Op::AllGather:
      gather(operation, !operation.has_own_part, true);
      break;
    case Op::AllToAll:
      for (int rank = 0; rank < size_; ++rank) {
        copy(out + rank * (out_bytes / size_), part(operation, rank, me_, out_bytes / size_), out_bytes / size_,
             stores(operation));
      }
      break;
    case Op::Broadcast:
      if (mine.root != me_) copy(out, payload(operation, mine.root), out_bytes, stores(operation));
      break;
    case Op::ReduceScatter:
    case Op::AllReduce: {
      if (operation.out.numel() == 0) break;
      for (int rank = 0; rank < size_; ++rank) {
        parts[rank] = mine.op == Op::ReduceScatter ? part(operation, rank, me_, out_bytes)
                      : rank == me_                ? out
                                                   : payload(operation, rank);
      }
      const kernels::Dtype dtype = sum_dtype(operation.out.scalar_type());
      kernels::sum_parts(out, dtype, parts.data(), size_, dtype, operation.out.numel(), stores(operation));
      break;
    }
    case Op::None:
    case Op::Exchange:
    case Op::Scattered:
      break;
  }
}

// No peer reads this rank's slice of an all_reduce before it contains the sum, so the sum is written in place.
void Rank::reduce_slice(Operation& operation) {
  const Slice own = slice(operation.in, me_);
  if (own.numel == 0) return;
  std::byte* const in = bytes_of(operation.in);
  std::vector<const void*> parts(size_);
  for (int rank = 0; rank < size_; ++rank) {
    parts[rank] = (rank == me_ ? in : payload(operation, rank)) + own.at;
  }
  const kernels::Dtype dtype = sum_dtype(operation.in.scalar_type());
  kernels::sum_parts(arena_->base() + operation.announced.offset + own.at, dtype, parts.data(), size_, dtype,
                     own.numel);
}

void Rank::finish_reading(Operation& operation) {
  // A rank that failed meanwhile may have overwritten the data.
  std::atomic_thread_fence(std::memory_order_acquire);
  group_->check_failure(operation.announced);
  group_->mine().finished.store(operation.announced.sequence, std::memory_order_release);
  if (size_ > 1) group_->ring();
  recycle();
  operation.phase = operation.direct ? Operation::Phase::Read : Operation::Phase::Complete;
}

void Rank::recycle() {
  std::uint64_t finished = staging_.any_lent() ? UINT64_MAX : 0;
  for (int rank = 0; rank < size_ && finished > 0; ++rank) {
    finished = std::min(finished, group_->page(rank).finished.load(std::memory_order_acquire));
  }
  staging_.recycle(finished, sequence_);
  pieces_->collect();
}

class ShmWork final : public Work {
 public:
  ShmWork(std::weak_ptr<Rank> rank, std::shared_ptr<Operation> operation)
      : rank_(std::move(rank)), operation_(std::move(operation)) {}

  void wait() override {
    if (operation_->phase == Operation::Phase::Complete) return;
    const std::shared_ptr<Rank> rank = owner();
    rank->complete(*operation_);
  }
  bool done() override {
    if (operation_->phase == Operation::Phase::Complete) return true;
    try {
      return owner()->try_complete(*operation_);
    } catch (const Error&) {
      return true;  // wait() will throw the error
    }
  }

 private:
  std::shared_ptr<Rank> owner() const {
    std::shared_ptr<Rank> rank = rank_.lock();
    if (rank == nullptr) throw CommError("[Shm::wait] got an unfinished operation whose communicator was destroyed");
    return rank;
  }

  std::weak_ptr<Rank> rank_;
  std::shared_ptr<Operation> operation_;
};

class ShmTransport final : public Transport {
 public:
  ShmTransport(const net::ProcessInfo& identity, std::chrono::milliseconds timeout,
               const std::function<void()>& abort_check, shm::Mappings* mappings)
      : Transport(identity), rank_(std::make_shared<Rank>(identity, timeout, abort_check, mappings)) {
    set_timeout(timeout);
  }

  std::string name() const override { return "shm"; }
  std::shared_ptr<Work> all_gather(at::Tensor out, at::Tensor in, std::string_view of) override {
    return begin(Op::AllGather, std::move(out), std::move(in), -1, of);
  }
  std::shared_ptr<Work> reduce_scatter(at::Tensor out, at::Tensor in) override {
    return begin(Op::ReduceScatter, std::move(out), std::move(in));
  }
  std::shared_ptr<Work> all_reduce(at::Tensor inout) override { return begin(Op::AllReduce, inout, inout); }
  std::shared_ptr<Work> broadcast(at::Tensor inout, int root) override {
    return begin(Op::Broadcast, inout, inout, root);
  }
  std::shared_ptr<Work> all_to_all(at::Tensor out, at::Tensor in) override {
    return begin(Op::AllToAll, std::move(out), std::move(in));
  }
  std::vector<std::string> all_gather_bytes(std::string_view mine) override { return rank_->all_gather_bytes(mine); }
  void abort(const std::string& reason) noexcept override { rank_->stop(own_failure(reason), rank_in_run()); }
  void stop(const std::string& reason, int rank) noexcept override { rank_->stop(reason, rank); }
  std::optional<PeerFailure> failure() const override { return rank_->failure(); }
  std::unique_ptr<Transport> split(const Split& split) override {
    return make_shm(split.identity, timeout_, split.abort_check);
  }

  at::Tensor allocate(std::int64_t numel, c10::ScalarType dtype) override {
    const auto options = at::TensorOptions().dtype(dtype);
    if (numel == 0) return at::empty({0}, options);
    const std::shared_ptr<Arena>& arena = rank_->arena();
    std::size_t bytes = 0;
    const bool overflow = __builtin_mul_overflow(static_cast<std::size_t>(numel), c10::elementSize(dtype), &bytes);
    std::byte* piece = arena->take(overflow ? SIZE_MAX : bytes);
    return at::from_blob(
        piece, {numel}, [arena](void* data) { arena->give(static_cast<std::byte*>(data)); }, options);
  }

  bool reads_in_place() const override { return true; }
  bool holds(const at::Tensor& tensor) const override {
    return rank_->arena()->holds(tensor.const_data_ptr(), tensor.nbytes());
  }
  std::shared_ptr<Work> peer_reduce_scatter(PeerReduce sum) override {
    return std::make_shared<ShmWork>(rank_, rank_->begin(std::move(sum)));
  }
  std::shared_ptr<SymmetricBuffer> share(std::int64_t shard_numel, c10::ScalarType dtype) override {
    return shm::share(rank_->place(), shard_numel, dtype);
  }

  void set_timeout(std::chrono::milliseconds timeout) override {
    Transport::set_timeout(timeout);
    rank_->set_timeout(timeout);
  }

 private:
  std::shared_ptr<Work> begin(Op op, at::Tensor out, at::Tensor in, int root = -1, std::string_view of = {}) {
    return std::make_shared<ShmWork>(rank_, rank_->begin(op, std::move(out), std::move(in), root, of));
  }

  std::shared_ptr<Rank> rank_;
};

}  // namespace

std::unique_ptr<Transport> make_shm(const net::ProcessInfo& identity, std::chrono::milliseconds timeout,
                                    const std::function<void()>& abort_check, shm::Mappings* mappings) {
  return std::make_unique<ShmTransport>(identity, timeout, abort_check, mappings);
}

}  // namespace zero::comm
