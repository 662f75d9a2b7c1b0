// [Note: pages and edges] Pages that belong to one shard are mapped from its rank's arena. This works for any shard
// size, because each rank places its shard at the same offset within a page as in the whole vector. A page in which two
// shards meet is private to the reader, which copies it whenever the shards were published: at most one page per
// border.
//
// [Note: leaving] A rank that frees the vector keeps its shard's pages unchanged until no peer maps them any more
// (shared_pieces.h): a peer may use published values long after this rank has ended.
#include "comm/shm/mapped_buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <ATen/ops/from_blob.h>
#include <zero/errors.h>

#include "base/check.h"
#include "base/gathered_values.h"
#include "base/newer_libc.h"
#include "net/transport_choice.h"

namespace zero::comm::shm {
namespace {

std::size_t up(std::size_t bytes) { return round_up(bytes, kPage); }
std::size_t down(std::size_t bytes) { return round_down(bytes, kPage); }

// This rank's counter, kept as long as the rank may read its peers' shards.
struct OwnEpoch {
  const std::shared_ptr<SharedPieces> pieces;
  const Epoch epoch;
  const std::shared_ptr<std::vector<Epoch>> peers = std::make_shared<std::vector<Epoch>>();  // excluding this rank's
  explicit OwnEpoch(std::shared_ptr<SharedPieces> all) : pieces(std::move(all)), epoch(pieces->begin()) {}
  ~OwnEpoch() { pieces->end(epoch, peers); }
  void advance(std::uint64_t more) const { pieces->advance(epoch, more); }
  OwnEpoch(const OwnEpoch&) = delete;
  OwnEpoch& operator=(const OwnEpoch&) = delete;
};

struct Whole {
  std::byte* const at;
  const std::size_t bytes;
  const std::shared_ptr<OwnEpoch> mine;  // destroyed after the last read
  Whole(std::byte* address, std::size_t num_bytes, std::shared_ptr<OwnEpoch> own)
      : at(address), bytes(num_bytes), mine(std::move(own)) {}
  ~Whole() { ::munmap(at, bytes); }
  Whole(const Whole&) = delete;
  Whole& operator=(const Whole&) = delete;
};

[[noreturn]] void fail_to_map(const char* what, std::size_t bytes) {
  throw IoError(
      base::join("[Shm::share] got \"", std::strerror(errno), "\" when ", what, " ", bytes,
                 " bytes of address space. Hint: raise vm.max_map_count or the limit of virtual memory (ulimit -v), or "
                 "set ZERO_TRANSPORT=gloo."));
}

class Vector final : public SymmetricBuffer {
 public:
  Vector(const VectorPlace& place, std::int64_t shard_numel, c10::ScalarType dtype)
      : group_(place.group), identity_(*place.identity), mine_(std::make_shared<OwnEpoch>(place.pieces)) {
    Arena& arena = *place.arena;
    const std::size_t bytes = static_cast<std::size_t>(shard_numel) * c10::elementSize(dtype);
    const auto options = at::TensorOptions().dtype(dtype);
    const std::size_t phase = static_cast<std::size_t>(identity_.rank) * bytes % kPage;
    std::byte* const piece = arena.take(bytes + phase + kPage);
    std::byte* const shard = arena.base() + up(arena.offset(piece)) + phase;
    shard_ = at::from_blob(
        shard, {shard_numel},
        [pieces = place.pieces, piece, peers = mine_->peers](void*) { pieces->give(piece, peers); }, options);

    struct Placed {
      std::uint64_t shard, number, begin;
    };
    const auto placed = base::all_gather_values(
        place, Placed{arena.offset(shard), arena.offset(mine_->epoch.number), mine_->epoch.begin});
    for (int rank = 0; rank < identity_.size; ++rank) {
      const Placed& its = placed[rank];
      auto* const number = const_cast<std::byte*>(group_->base(rank) + its.number);
      if (rank != identity_.rank) mine_->peers->push_back({reinterpret_cast<Epoch::Number*>(number), its.begin});
    }
    const std::size_t total = bytes * static_cast<std::size_t>(identity_.size);
    auto* const at =
        static_cast<std::byte*>(::mmap(nullptr, up(total), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (at == MAP_FAILED) fail_to_map("reserving", up(total));
    auto owner = std::make_shared<Whole>(at, up(total), mine_);
    for (int rank = 0; rank < identity_.size; ++rank) {
      const Placed& its = placed[rank];
      const std::byte* const base = group_->base(rank);
      const std::size_t begin = rank * bytes, end = begin + bytes;
      const std::size_t first = std::min(up(begin), end), last = std::max(down(end), first);
      const auto edge = [&](std::size_t from, std::size_t to) {
        if (from < to) edges_.push_back({at + from, base + its.shard + (from - begin), to - from});
      };
      edge(begin, first);
      edge(last, end);
      if (first == last) continue;
      // With an old size of zero, mremap(2) maps the same shared pages a second time.
      auto* const source = const_cast<std::byte*>(base + its.shard + (first - begin));
      if (::mremap(source, 0, last - first, MREMAP_MAYMOVE | MREMAP_FIXED, at + first) == MAP_FAILED ||
          ::mprotect(at + first, last - first, PROT_READ) != 0)
        fail_to_map("mapping", last - first);
      ::madvise(at + first, last - first,
                MADV_POPULATE_READ);  // if the kernel supports it; otherwise pages are mapped by faults
    }
    ::madvise(at, up(total), MADV_DONTDUMP);
    whole_ = at::from_blob(
        at, {shard_numel * identity_.size}, [owner](void*) mutable { owner.reset(); }, options);
    announcement_.op = Op::AllGather;
    announcement_.dtype = static_cast<std::int32_t>(dtype);
    announcement_.numel = shard_numel * identity_.size;
  }

  ~Vector() override { mine_->advance(Epoch::kGivenUp); }

  void publish() override {
    ++published_;
    mine_->advance(Epoch::kPublication);
  }

  void wait() override {
    if (seen_ == published_) return;
    announcement_.sequence = published_;
    group_->await([this](int peer) { return of(peer).published() >= published_ || of(peer).given_up(); },
                  announcement_);
    for (int peer = 0; peer < identity_.size; ++peer)
      if (peer != identity_.rank && of(peer).published() < published_)
        group_->fail_and_throw(announcement_,
                               base::join(identity_.name_of(peer), " has given up its shard, expected it to stay"),
                               "every rank keeps its Engine while another one trains", peer);
    for (const Edge& edge : edges_) std::memcpy(edge.to, edge.from, edge.bytes);
    seen_ = published_;
  }

 private:
  struct Edge {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
  };
  const Epoch& of(int peer) const { return (*mine_->peers)[peer < identity_.rank ? peer : peer - 1]; }

  std::shared_ptr<Group> group_;
  const net::ProcessInfo identity_;
  const std::shared_ptr<OwnEpoch> mine_;
  std::vector<Edge> edges_;
  std::uint64_t published_ = 0, seen_ = 0;
  Announcement announcement_;  // for the messages of a failed wait
};

}  // namespace

std::shared_ptr<SymmetricBuffer> share(const VectorPlace& place, std::int64_t shard_numel, c10::ScalarType dtype) {
  if (static_cast<std::size_t>(shard_numel) * c10::elementSize(dtype) < net::kLeastMappedBytes) return nullptr;
  return std::make_shared<Vector>(place, shard_numel, dtype);
}

}  // namespace zero::comm::shm
