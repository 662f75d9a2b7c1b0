#include "comm/shm/shared_pieces.h"

#include <unistd.h>

#include <algorithm>
#include <new>

#include "comm/shm/host.h"

namespace zero::comm::shm {

SharedPieces::SharedPieces(Host& host) : host_(host), arena_(host.arena()), pid_(::getpid()) {
  free_.reserve(1);  // the counter of the group of all ranks, which begin() does not create
}

Epoch SharedPieces::begin() {
  collect();
  std::lock_guard lock(mutex_);
  if (!free_.empty()) {
    const Epoch epoch = free_.back();
    free_.pop_back();
    return epoch;
  }
  free_.reserve(free_.capacity() + 1);  // reserves space for each slot, so that freeing one cannot fail
  return {new (arena_->take(sizeof(Epoch::Number))) Epoch::Number(0), 0};
}

void SharedPieces::advance(const Epoch& mine, std::uint64_t more) noexcept {
  if (::getpid() != pid_) return;
  mine.number->fetch_add(more, std::memory_order_acq_rel);
  host_.ring();
}

void SharedPieces::end(const Epoch& mine, Readers readers) noexcept {
  advance(mine, Epoch::kGone);
  leave({nullptr, mine.number, mine.begin, std::move(readers)});
}

void SharedPieces::give(std::byte* piece, Readers readers) noexcept { leave({piece, nullptr, 0, std::move(readers)}); }

void SharedPieces::leave(Left left) noexcept {
  if (::getpid() != pid_) return;
  collect();
  std::lock_guard lock(mutex_);
  if (take_back(left)) return;
  try {
    left_.push_back(std::move(left));
    any_left_.store(true, std::memory_order_relaxed);
  } catch (const std::bad_alloc&) {  // it is never freed
    if (left.piece != nullptr) arena_->pin(left.piece);
  }
}

void SharedPieces::collect() noexcept {
  if (!any_left_.load(std::memory_order_relaxed) || ::getpid() != pid_) return;
  std::lock_guard lock(mutex_);
  std::erase_if(left_, [this](const Left& left) { return take_back(left); });
  any_left_.store(!left_.empty(), std::memory_order_relaxed);
}

bool SharedPieces::take_back(const Left& left) noexcept {
  if (!std::all_of(left.readers->begin(), left.readers->end(), [](const Epoch& reader) { return reader.gone(); }))
    return false;
  if (left.piece != nullptr) {
    arena_->give(left.piece);
  } else {
    free_.push_back({left.place, left.begin + 2 * Epoch::kGone});
    left.place->store(left.begin + 2 * Epoch::kGone, std::memory_order_release);
  }
  return true;
}

}  // namespace zero::comm::shm
