// Pieces of this rank's arena for inputs that peers cannot read in place. A piece is lent for one operation, becomes
// idle when all ranks have finished it, and is kept for a while for reuse.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>

#include "comm/shm/arena.h"
#include "comm/shm/shared_pieces.h"

namespace zero::comm::shm {

struct Staging {
  std::byte* piece = nullptr;
  std::size_t bytes = 0;
  std::uint64_t sequence = 0;  // of the operation that last used it
};

class StagingPieces {
 public:
  explicit StagingPieces(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  // The smallest idle piece of suitable size, else a new one.
  Staging take(std::size_t bytes);
  // Peers may read the piece until they have finished its operation. Call in order of sequence.
  void lend(const Staging& staging) { lent_.push_back(staging); }
  bool any_lent() const { return !lent_.empty(); }
  // Takes back pieces that every rank has `finished`, and frees pieces that were not needed up to operation `now`.
  void recycle(std::uint64_t finished, std::uint64_t now);
  // At the end: frees idle pieces now, and lent ones when the `readers` are gone.
  void leave(SharedPieces& pieces, const Readers& readers);

 private:
  std::shared_ptr<Arena> arena_;
  std::deque<Staging> lent_, idle_;  // by sequence
  std::size_t idle_bytes_ = 0;
};

}  // namespace zero::comm::shm
