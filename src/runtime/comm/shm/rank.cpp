// See rank.h. Other files of this folder implement waiting and failures, memory, rendezvous, reductions of tensor
// segments, and symmetric buffers.
#include "comm/shm/rank.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include <zero/errors.h>

#include "base/check.h"
#include "comm/shm/copy.h"
#include "comm/shm/rendezvous.h"
#include "kernels/elementwise.h"

namespace zero::comm::shm {
namespace {

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

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

Rank::Rank(const std::shared_ptr<Host>& host, std::shared_ptr<Group> group, const net::ProcessInfo& identity,
           std::byte* page)
    : identity_(identity),
      me_(identity.rank),
      size_(identity.size),
      pid_(::getpid()),
      host_(host),
      arena_(host->arena()),
      pieces_(host->pieces()),
      group_(std::move(group)),
      page_(page),
      staging_(arena_) {}

Rank::Rank(const net::ProcessInfo& identity, const std::shared_ptr<Host>& host, std::vector<int> members,
           const std::vector<PagePlace>& pages)
    : Rank(host, std::make_shared<Group>(identity, host, std::move(members), pages), identity,
           host->arena()->base() + host->take_offer().page) {}

Rank::Rank(const net::ProcessInfo& identity, const std::shared_ptr<Host>& host)
    : Rank(host,
           std::make_shared<Group>(identity, host, all_ranks(identity.size),
                                   std::vector<PagePlace>(static_cast<std::size_t>(identity.size), Host::first_page())),
           identity, nullptr) {}

Rank::~Rank() {
  if (::getpid() != pid_) return;  // a forked child must not change memory that it shares with the rank
  // Peers may still read announced data and the page.
  const Readers& readers = group_->peers();
  recycle();
  staging_.leave(*pieces_, readers);
  for (const auto& operation : pending_) {
    if (operation->direct && operation->in.defined()) arena_->pin(bytes_of(operation->in));
    for (const auto& stretch : operation->scattered.vector) arena_->pin(bytes_of(stretch.data));
  }
  pieces_->end(group_->left(), readers);
  if (page_ != nullptr) pieces_->give(page_, readers);
}

std::shared_ptr<Operation> Rank::prepare(Op op, at::Tensor out, at::Tensor in) {
  if (!in.is_cpu()) {
    throw ConfigError(base::join("[Communicator::", op_name(op), "] got a tensor on ", in.device().str(),
                                 ", expected CPU memory (", identity_.place(),
                                 "). Hint: ZERO_TRANSPORT=nccl is for tensors of GPUs."));
  }
  auto operation = std::make_shared<Operation>();
  operation->announced.op = op;
  operation->announced.dtype = static_cast<std::int32_t>(in.scalar_type());
  operation->announced.numel = std::max(out.numel(), in.numel());
  operation->out = std::move(out);
  operation->in = std::move(in);
  return operation;
}

bool Rank::readable_in_place(const at::Tensor& tensor, std::size_t bytes) const {
  return bytes >= kDirectBytes && size_ > 1 && arena_->holds(bytes_of(tensor), bytes);
}

std::shared_ptr<Operation> Rank::begin(Op op, at::Tensor out, at::Tensor in, int root, std::string_view of) {
  const auto turn = turns_.take();
  auto operation = prepare(op, std::move(out), std::move(in));
  Announcement& mine = operation->announced;
  mine.root = root;
  mine.set_of(of);
  make_room(mine);
  const bool gives = root < 0 || root == me_;
  const std::size_t bytes = gives ? operation->in.nbytes() : 0;
  operation->direct = readable_in_place(operation->in, bytes);
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

// Stages the places of the parts, and the parts for the peers unless they are read in place.
std::shared_ptr<Operation> Rank::begin(at::Tensor out, at::Tensor in, Parts parts) {
  const auto turn = turns_.take();
  auto operation = prepare(Op::AllToAll, std::move(out), std::move(in));
  Announcement& mine = operation->announced;
  mine.numel = parts.call(operation->in).numel;
  make_room(mine);
  const std::size_t width = operation->in.element_size();
  const std::size_t own = parts.in[static_cast<std::size_t>(me_)] * width;
  operation->direct = readable_in_place(operation->in, operation->in.nbytes());
  mine.bytes = size_ * sizeof(PartPlace) + (operation->direct ? 0 : operation->in.nbytes() - own);
  const Staging staging = staging_.take(mine.bytes);
  mine.offset = arena_->offset(staging.piece);
  auto* const places = reinterpret_cast<PartPlace*>(staging.piece);
  std::byte* free = staging.piece + size_ * sizeof(PartPlace);
  const std::byte* from = bytes_of(operation->in);
  for (int rank = 0; rank < size_; ++rank) {
    const std::size_t bytes = parts.in[static_cast<std::size_t>(rank)] * width;
    PartPlace place{0, bytes};
    if (rank != me_) {
      const std::byte* readable = from;
      if (!operation->direct) {
        copy(free, from, bytes);
        readable = std::exchange(free, free + bytes);
      }
      place.offset = arena_->offset(readable);
    }
    places[rank] = place;
    from += bytes;
  }
  operation->parts = std::move(parts);
  publish(operation, staging);
  return operation;
}

// Announces the address of each segment to the peers.
std::shared_ptr<Operation> Rank::begin(PeerReduce sum) {
  const auto turn = turns_.take();
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
  const auto turn = turns_.take();
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
  complete_here(*operation);
  return std::move(operation->messages);
}

// This slot was used kRing operations ago; waits until all ranks have finished that operation.
void Rank::make_room(Announcement& mine) {
  const std::uint64_t next = mine.sequence = sequence_ + 1;
  group_->check_failure(mine);
  while (!pending_.empty() && pending_.front()->announced.sequence + kRing <= next) {
    complete_here(*pending_.front());
  }
  if (next > kRing) {
    const std::uint64_t old = next - kRing;
    group_->await([&](int peer) { return reached(&Page::finished, peer, old); }, mine);
  }
  recycle();
}

// Copies the data for the peers into a new staging piece.
Staging Rank::stage(Operation& operation) {
  Announcement& mine = operation.announced;
  const at::Tensor& in = operation.in;
  const std::byte* from = bytes_of(in);
  const bool equal_parts = mine.op == Op::ReduceScatter;
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
  group_->mine().ring[sequence_ % kRing] = operation->announced;
  pending_.push_back(operation);
  group_->mine().posted.store(sequence_, std::memory_order_release);
  if (size_ > 1) group_->ring();
}

void Rank::complete(const Operation& operation) {
  const auto turn = turns_.take();
  complete_here(operation);
}

bool Rank::try_complete(const Operation& operation) {
  const auto turn = turns_.take();
  return try_complete_here(operation);
}

bool Rank::advance() {
  const auto turn = turns_.try_take();
  if (!turn || pending_.empty()) return false;
  const std::shared_ptr<Operation> last = pending_.back();
  return !try_complete_here(*last);
}

void Rank::complete_here(const Operation& operation) {
  while (operation.phase != Operation::Phase::Complete) {
    const std::shared_ptr<Operation> first = pending_.front();
    while (!advance(*first, true)) {
    }
    pending_.pop_front();
  }
}

bool Rank::try_complete_here(const Operation& operation) {
  while (operation.phase != Operation::Phase::Complete) {
    const std::shared_ptr<Operation> first = pending_.front();
    group_->check_failure(first->announced);
    while (first->phase != Operation::Phase::Complete) {
      const auto before = first->phase.load();
      if (!advance(*first, false) && first->phase == before) return false;
    }
    pending_.pop_front();
  }
  return true;
}

// Whether all peers are ready; blocking: waits until they are.
bool Rank::all(const Ready& ready, const Operation& operation, bool blocking) {
  if (!blocking) return group_->poll(ready, operation.announced);
  group_->await(ready, operation.announced);
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
        return !gives || reached(&Page::posted, peer, sequence);
      };
      if (operation.announced.op == Op::AllGather && !operation.has_own_part) {
        operation.has_own_part = stores(operation) == kernels::Stores::Cached;
        if (operation.has_own_part) gather(operation, true, false);  // before the wait, which it shortens
      }
      if (!all(posted, operation, blocking)) return false;
      check_agreement(operation);
      if (operation.announced.op == Op::Scattered) {
        sum_own_part(operation.scattered, places(operation), me_);
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
      const auto reduced = [&](int peer) { return reached(&Page::reduced, peer, sequence); };
      if (!all(reduced, operation, blocking)) return false;
      if (operation.announced.op == Op::Scattered) {
        copy_other_parts(operation.scattered, places(operation), me_);
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
      const auto finished = [&](int peer) { return reached(&Page::finished, peer, sequence); };
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
    operation.parts = {};
    return true;
  }
  return false;
}

void Rank::check_agreement(const Operation& operation) {
  const Announcement& mine = operation.announced;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == me_ || !reached(&Page::posted, peer, mine.sequence)) continue;
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
  gather_parts(bytes_of(operation.out), parts, operation.in.nbytes(), me_, stores(operation));
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
      read_parts(operation);
      break;
    case Op::Broadcast:
      if (mine.root != me_) copy(out, payload(operation, mine.root), out_bytes, stores(operation));
      break;
    case Op::ReduceScatter:
    case Op::AllReduce: {
      if (operation.out.numel() == 0) break;
      for (int rank = 0; rank < size_; ++rank) {
        parts[rank] = mine.op == Op::ReduceScatter ? part_for_me(operation, rank, out_bytes)
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

void Rank::read_parts(Operation& operation) {
  const auto& [expected, sent, equal] = operation.parts;
  const std::size_t width = operation.in.element_size();
  const std::int64_t before = std::accumulate(sent.begin(), sent.begin() + me_, std::int64_t{0});
  std::byte* to = bytes_of(operation.out);
  for (int rank = 0; rank < size_; ++rank) {
    const std::size_t bytes = expected[static_cast<std::size_t>(rank)] * width;
    const std::byte* from = bytes_of(operation.in) + before * width;
    if (rank != me_) {
      const PartPlace& place = reinterpret_cast<const PartPlace*>(payload(operation, rank))[me_];
      if (place.bytes != bytes)
        group_->fail_and_throw(operation.announced,
                               parts_differ(identity_.name_of(rank), static_cast<std::int64_t>(place.bytes / width),
                                            identity_.name_of(me_), static_cast<std::int64_t>(bytes / width)),
                               {}, -1);
      from = group_->base(rank) + place.offset;
    }
    copy(to, from, bytes, stores(operation));
    to += bytes;
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

const std::byte* Rank::part_for_me(const Operation& operation, int from, std::size_t bytes) const {
  if (from == me_) return bytes_of(operation.in) + me_ * bytes;
  const Announcement& theirs = group_->announcement(from, operation.announced.sequence);
  const int place = theirs.without_own != 0 && me_ > from ? me_ - 1 : me_;
  return payload(operation, from) + place * bytes;
}

Places Rank::places(const Operation& operation) const {
  const std::size_t count = operation.scattered.vector.size();
  Places places(size_, std::vector<const std::byte*>(count));
  for (int rank = 0; rank < size_; ++rank) {
    const auto* offsets = reinterpret_cast<const std::uint64_t*>(payload(operation, rank));
    for (std::size_t i = 0; i < count; ++i) places[rank][i] = group_->base(rank) + offsets[i];
  }
  return places;
}

Slice Rank::slice(const at::Tensor& tensor, int rank) const {
  const std::int64_t numel = tensor.numel();
  const std::int64_t per_rank = ((numel + size_ - 1) / size_ + kSliceNumel - 1) / kSliceNumel * kSliceNumel;
  const std::int64_t first = std::min(rank * per_rank, numel), last = std::min(first + per_rank, numel);
  const std::size_t element = tensor.element_size();
  return {first * element, (last - first) * element, last - first};
}

kernels::Stores Rank::stores(const Operation& operation) const {
  return stores_for(std::max(operation.in.nbytes(), operation.out.nbytes()), size_);
}

bool Rank::one_phase(const Operation& operation) const { return size_ == 1 || operation.in.nbytes() <= kOnePhaseBytes; }

}  // namespace zero::comm::shm
