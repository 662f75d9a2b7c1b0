#include "comm/shm/staging.h"

namespace zero::comm::shm {
namespace {

// Fresh pages cost more than the copy into them, so staging pieces are kept for reuse: for this many operations, and up
// to this total size.
constexpr std::uint64_t kIdleOperations = 32;
constexpr std::size_t kIdleBytes = 64 << 20;

}  // namespace

Staging StagingPieces::take(std::size_t bytes) {
  auto best = idle_.end();
  for (auto idle = idle_.begin(); idle != idle_.end(); ++idle) {
    if (idle->bytes < bytes || idle->bytes / 2 > bytes) continue;
    if (best == idle_.end() || idle->bytes < best->bytes) best = idle;
  }
  if (best == idle_.end()) return {arena_->take(bytes), bytes, 0};
  const Staging staging = *best;
  idle_bytes_ -= staging.bytes;
  idle_.erase(best);
  return staging;
}

void StagingPieces::recycle(std::uint64_t finished, std::uint64_t now) {
  for (; !lent_.empty() && lent_.front().sequence <= finished; lent_.pop_front()) {
    const Staging& staging = lent_.front();
    if (staging.bytes < Arena::kLargeBytes) {
      arena_->give(staging.piece);
    } else {
      idle_.push_back(staging);
      idle_bytes_ += staging.bytes;
    }
  }
  while (!idle_.empty() && (idle_bytes_ > kIdleBytes || idle_.front().sequence + kIdleOperations < now)) {
    idle_bytes_ -= idle_.front().bytes;
    arena_->give(idle_.front().piece);
    idle_.pop_front();
  }
}

void StagingPieces::leave(SharedPieces& pieces, const Readers& readers) {
  for (const Staging& idle : idle_) arena_->give(idle.piece);
  for (const Staging& staging : lent_) pieces.give(staging.piece, readers);
  idle_.clear();
  lent_.clear();
}

}  // namespace zero::comm::shm
