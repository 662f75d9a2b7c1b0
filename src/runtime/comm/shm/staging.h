// Pieces of the own arena into which inputs are copied that the peers cannot read in place: lent for an operation, free
// again when all ranks have finished it, and then kept for a while for the next use.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>

#include "comm/shm/arena.h"

namespace zero::comm::shm {

struct Staging {
  std::byte* piece = nullptr;
  std::size_t bytes = 0;
  std::uint64_t sequence = 0;  // of the operation in or for which it was used last
};

class StagingPieces {
 public:
  explicit StagingPieces(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  // The smallest idle piece that fits well, else a new one.
  Staging take(std::size_t bytes);
  // The peers may read it until they have finished its operation. By sequence.
  void lend(const Staging& staging) { lent_.push_back(staging); }
  bool any_lent() const { return !lent_.empty(); }
  // Takes back what every rank has `finished`, and frees what nobody needed up to operation `now`.
  void recycle(std::uint64_t finished, std::uint64_t now);
  // The end: idle pieces are freed; the lent ones stay for peers that may still read them.
  void leave();

 private:
  std::shared_ptr<Arena> arena_;
  std::deque<Staging> lent_, idle_;  // by sequence
  std::size_t idle_bytes_ = 0;
};

}  // namespace zero::comm::shm
