// What shared vectors need of a rank beyond their own life: the numbers by which ranks tell each other how far their
// part of a vector is, and the pieces of shards that peers may still read after this rank has given them up. No
// tensors.
//
// [Note: numbers that only grow] A number lies in a place of its own and tells of one vector: how often its rank has
// published, that it has given the vector up, and that it reads it no more. When that is said and all peers read it no
// more either, the place serves another vector, with larger numbers, and never anything else. So a peer that looks
// late, to see whether its own piece is still read, sees the truth, and nobody has to know when the last peer has
// looked.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/shm/arena.h"
#include "comm/shm/group.h"

namespace zero::comm::shm {

// One rank's number for one vector: begin + 2 * published + given up, and kGone more once it reads it no more.
struct Epoch {
  using Number = std::atomic<std::uint64_t>;
  static constexpr std::uint64_t kGivenUp = 1, kPublication = 2, kGone = std::uint64_t{1} << 32;

  Number* number = nullptr;
  std::uint64_t begin = 0;

  // The first two are for ranks that read the vector themselves.
  std::uint64_t published() const { return told() % kGone / kPublication; }
  bool given_up() const { return told() % kPublication == kGivenUp; }
  bool gone() const { return told() >= kGone; }

 private:
  std::uint64_t told() const { return number->load(std::memory_order_acquire) - begin; }
};

using Readers = std::shared_ptr<const std::vector<Epoch>>;

// Safe for several threads at once. In a fork of the rank nothing happens: the memory is its parent's.
class SharedPieces {
 public:
  SharedPieces(std::shared_ptr<Arena> arena, std::shared_ptr<Group> group);

  // A number for one more vector.
  Epoch begin();
  // Tells the peers one thing more: kPublication, kGivenUp or, after the last of these, kGone.
  void tell(const Epoch& mine, std::uint64_t more) noexcept;

  // Takes the number's place back when all `readers` are gone; this rank is, and it needs no other mention.
  void end(const Epoch& mine, Readers readers) noexcept;
  // Gives the piece back to the arena when all `readers` are gone; until then it keeps its bytes.
  void give(std::byte* piece, Readers readers) noexcept;
  // Looks for what may go by now. Costs nothing when there is nothing.
  void collect() noexcept;

 private:
  struct Left {
    std::byte* piece;  // or
    Epoch::Number* place;
    std::uint64_t begin;
    Readers readers;
  };
  void leave(Left left) noexcept;
  bool take_back(const Left& left) noexcept;  // under the mutex; false: somebody reads

  std::shared_ptr<Arena> arena_;
  std::shared_ptr<Group> group_;  // keeps the peers' numbers mapped
  const pid_t pid_;
  std::mutex mutex_;
  std::vector<Epoch> free_;  // for the next vectors
  std::vector<Left> left_;
  std::atomic<bool> any_left_{false};
};

}  // namespace zero::comm::shm
