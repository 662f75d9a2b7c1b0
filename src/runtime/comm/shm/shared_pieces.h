// What of a symmetric buffer or a group must outlive it: the counters by which ranks tell each other the state of their
// shard, or that they have left, and freed memory that peers may still read. No tensors.
//
// [Note: numbers that only grow] A counter has its own slot and describes one vector: how often its rank has published,
// whether the rank has freed the vector, and whether it no longer reads it. Once a rank and all peers no longer read
// the vector, the slot is reused for another vector, with larger values, and never for anything else. A peer that
// checks late whether its shard is still read therefore gets a correct answer, and no rank needs to know when the last
// peer has checked.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/shm/arena.h"

namespace zero::comm::shm {

class Host;

// One rank's counter for one vector: begin + 2 * publications + freed, plus kGone once the rank no longer reads it.
struct Epoch {
  using Number = std::atomic<std::uint64_t>;
  static constexpr std::uint64_t kGivenUp = 1, kPublication = 2, kGone = std::uint64_t{1} << 32;

  Number* number = nullptr;
  std::uint64_t begin = 0;

  // published() and given_up() are valid only for ranks that still read the vector.
  std::uint64_t published() const { return value() % kGone / kPublication; }
  bool given_up() const { return value() % kPublication == kGivenUp; }
  bool gone() const { return value() >= kGone; }

 private:
  std::uint64_t value() const { return number->load(std::memory_order_acquire) - begin; }
};

using Readers = std::shared_ptr<const std::vector<Epoch>>;

// Part of a Host. Thread-safe. No effect in a forked child: the memory belongs to the parent.
class SharedPieces {
 public:
  explicit SharedPieces(Host& host);

  // A counter for a new vector.
  Epoch begin();
  // Adds kPublication, kGivenUp or, last of all, kGone to the counter and wakes the peers.
  void advance(const Epoch& mine, std::uint64_t more) noexcept;

  // Frees the counter's slot when all `readers` are gone. Call after this rank's kGone.
  void end(const Epoch& mine, Readers readers) noexcept;
  // Frees the piece when all `readers` are gone; until then its contents are unchanged.
  void give(std::byte* piece, Readers readers) noexcept;
  // Frees pieces and slots that have no readers any more. Costs nothing if there are none.
  void collect() noexcept;

 private:
  struct Left {
    std::byte* piece;  // or
    Epoch::Number* place;
    std::uint64_t begin;
    Readers readers;
  };
  void leave(Left left) noexcept;
  bool take_back(const Left& left) noexcept;  // requires the mutex; false: still read

  Host& host_;
  const std::shared_ptr<Arena> arena_;
  const pid_t pid_;
  std::mutex mutex_;
  std::vector<Epoch> free_;  // for the next vectors
  std::vector<Left> left_;
  std::atomic<bool> any_left_{false};
};

}  // namespace zero::comm::shm
