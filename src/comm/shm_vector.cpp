// [Note: pages and edges] Pages that lie in one shard entirely are mapped from its rank's arena. That works for any
// shard size because each rank puts its shard at the place within a page that it has in the whole vector. The page in
// which two shards meet is private to the reader, who copies it whenever the shards were published: at most a page for
// each border.
#include "comm/shm_vector.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>

#include <ATen/ops/from_blob.h>
#include <zero/errors.h>

#include "base/check.h"
#include "config/stage_rules.h"

namespace zero::comm::shm {
namespace {

constexpr std::uint64_t kGone = std::numeric_limits<std::uint64_t>::max();  // its rank gave the vector up

using Epoch = std::atomic<std::uint64_t>;

std::size_t up(std::size_t bytes) { return round_up(bytes, kPage); }
std::size_t down(std::size_t bytes) { return round_down(bytes, kPage); }

struct Whole {
  std::byte* const at;
  const std::size_t bytes;
  Whole(std::byte* address, std::size_t num_bytes) : at(address), bytes(num_bytes) {}
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

class Vector final : public SharedVector {
 public:
  Vector(const VectorPlace& place, std::int64_t shard_numel, c10::ScalarType dtype, std::chrono::milliseconds timeout)
      : arena_(place.arena),
        group_(place.group),
        identity_(*place.identity),
        timeout_(timeout),
        epochs_(identity_.size) {
    const std::size_t bytes = static_cast<std::size_t>(shard_numel) * c10::elementSize(dtype);
    const auto options = at::TensorOptions().dtype(dtype);
    const std::size_t phase = static_cast<std::size_t>(identity_.rank) * bytes % kPage;
    std::byte* const piece = arena_->take(bytes + phase + kPage);
    std::byte* const shard = arena_->base() + up(arena_->offset(piece)) + phase;
    shard_ = at::from_blob(
        shard, {shard_numel}, [arena = arena_, piece](void*) { arena->give(piece); }, options);
    std::byte* const flag = arena_->take(sizeof(Epoch));
    epoch_ = new (flag) Epoch(0);

    struct Told {
      std::uint64_t shard, epoch;
    };
    const Told mine{arena_->offset(shard), arena_->offset(flag)};
    const auto all = place.exchange({reinterpret_cast<const char*>(&mine), sizeof mine});
    const std::size_t total = bytes * static_cast<std::size_t>(identity_.size);
    auto* const at =
        static_cast<std::byte*>(::mmap(nullptr, up(total), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (at == MAP_FAILED) fail_to_map("reserving", up(total));
    auto owner = std::make_shared<Whole>(at, up(total));
    for (int rank = 0; rank < identity_.size; ++rank) {
      Told told;
      ZERO_CHECK(all[rank].size() == sizeof told, "rank ", identity_.rank_in_run(rank), " shared something else");
      std::memcpy(&told, all[rank].data(), sizeof told);
      const std::byte* const base = group_->base(rank);
      epochs_[rank] = reinterpret_cast<const Epoch*>(base + told.epoch);
      const std::size_t begin = rank * bytes, end = begin + bytes;
      const std::size_t first = std::min(up(begin), end), last = std::max(down(end), first);
      const auto edge = [&](std::size_t from, std::size_t to) {
        if (from < to) edges_.push_back({at + from, base + told.shard + (from - begin), to - from});
      };
      edge(begin, first);
      edge(last, end);
      if (first == last) continue;
      // An old size of zero maps the same shared pages a second time (mremap(2)).
      auto* const source = const_cast<std::byte*>(base + told.shard + (first - begin));
      if (::mremap(source, 0, last - first, MREMAP_MAYMOVE | MREMAP_FIXED, at + first) == MAP_FAILED ||
          ::mprotect(at + first, last - first, PROT_READ) != 0)
        fail_to_map("mapping", last - first);
      ::madvise(at + first, last - first,
                MADV_POPULATE_READ);  // where the kernel has it; else the pages come by faults
    }
    whole_ = at::from_blob(
        at, {shard_numel * identity_.size}, [owner](void*) mutable { owner.reset(); }, options);
    announcement_.op = Op::AllGather;
    announcement_.dtype = static_cast<std::int32_t>(dtype);
    announcement_.numel = shard_numel * identity_.size;
  }

  ~Vector() override {
    // The flag stays where it is: a peer may look at it later than this.
    epoch_->store(kGone, std::memory_order_release);
    arena_->pin(reinterpret_cast<std::byte*>(epoch_));
    group_->ring();
  }

  void publish() override {
    ++published_;
    epoch_->store(published_, std::memory_order_release);
    group_->ring();
  }

  void wait() override {
    announcement_.sequence = published_;
    if (seen_ < published_) {
      group_->await([this](int peer) { return epochs_[peer]->load(std::memory_order_acquire) >= published_; },
                    announcement_, timeout_);
      for (const Edge& edge : edges_) std::memcpy(edge.to, edge.from, edge.bytes);
      seen_ = published_;
    }
    for (int peer = 0; peer < identity_.size; ++peer)
      if (epochs_[peer]->load(std::memory_order_acquire) == kGone)
        group_->fail_and_throw(announcement_,
                               base::join(identity_.name_of(peer), " has given up its shard, expected it to stay"),
                               "every rank keeps its Engine while another one reads parameters", peer);
  }

 private:
  struct Edge {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
  };
  std::shared_ptr<Arena> arena_;
  std::shared_ptr<Group> group_;
  const Identity identity_;
  const std::chrono::milliseconds timeout_;
  Epoch* epoch_ = nullptr;
  std::vector<const Epoch*> epochs_;  // by rank
  std::vector<Edge> edges_;
  std::uint64_t published_ = 0, seen_ = 0;
  Announcement announcement_;  // what the messages of a failed wait say
};

}  // namespace

std::shared_ptr<SharedVector> share(const VectorPlace& place, std::int64_t shard_numel, c10::ScalarType dtype,
                                    std::chrono::milliseconds timeout) {
  if (static_cast<std::size_t>(shard_numel) * c10::elementSize(dtype) < config::kLeastMappedBytes) return nullptr;
  return std::make_shared<Vector>(place, shard_numel, dtype, timeout);
}

}  // namespace zero::comm::shm
