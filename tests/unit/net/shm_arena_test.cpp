// comm/shm/arena.h: ranges, first fit, and memory that goes back to the system.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include <zero/errors.h>

#include "comm/shm/arena.h"

namespace zero::comm::shm::shm_arena_test {
namespace {

using Ranges = std::map<std::size_t, std::size_t>;

TEST(RangeSet, NeighboursAreJoinedAndPiecesCutOut) {
  RangeSet set;
  set.add(10, 5);
  set.add(20, 5);
  EXPECT_EQ(set.ranges(), (Ranges{{10, 5}, {20, 5}}));
  set.add(15, 5);
  EXPECT_EQ(set.ranges(), (Ranges{{10, 15}})) << "both sides";
  set.add(5, 5);
  set.add(25, 1);
  EXPECT_EQ(set.ranges(), (Ranges{{5, 21}}));
  set.remove(10, 2);
  EXPECT_EQ(set.ranges(), (Ranges{{5, 5}, {12, 14}}));
  set.remove(0, 6);
  set.remove(25, 100);
  EXPECT_EQ(set.ranges(), (Ranges{{6, 4}, {12, 13}}));
  set.remove(100, 5);
  EXPECT_EQ(set.total(), 17u);
  set.remove(7, 10);
  EXPECT_EQ(set.ranges(), (Ranges{{6, 1}, {17, 8}})) << "over several";
  set.clear();
  EXPECT_EQ(set.total(), 0u);
}

TEST(RangeSet, EqualsASetOfNumbers) {
  std::mt19937 random(1);
  RangeSet set;
  std::set<std::size_t> numbers;
  for (int i = 0; i < 3000; ++i) {
    const std::size_t at = random() % 200, bytes = 1 + random() % 20;
    bool free = true;
    for (std::size_t n = at; n < at + bytes; ++n) free &= numbers.count(n) == 0;
    if (free && random() % 2 == 0) {
      set.add(at, bytes);
      for (std::size_t n = at; n < at + bytes; ++n) numbers.insert(n);
    } else {
      set.remove(at, bytes);
      for (std::size_t n = at; n < at + bytes; ++n) numbers.erase(n);
    }
    std::set<std::size_t> got;
    std::size_t end = 0;
    for (const auto& [first, length] : set.ranges()) {
      ASSERT_TRUE(got.empty() || first > end) << "neighbours are one range";
      end = first + length;
      for (std::size_t n = first; n < end; ++n) got.insert(n);
    }
    ASSERT_EQ(got, numbers);
    ASSERT_EQ(set.total(), numbers.size());
  }
}

std::size_t present(const Arena& arena) {
  std::vector<unsigned char> pages(arena.capacity() / kPage);
  EXPECT_EQ(::mincore(arena.base(), arena.capacity(), pages.data()), 0);
  std::size_t count = 0;
  for (const unsigned char page : pages) count += page & 1;
  return count * kPage;
}

TEST(Arena, PiecesAreAlignedAndDoNotOverlap) {
  Arena arena(1 << 20, 100);
  std::map<std::byte*, std::size_t> pieces;
  for (const std::size_t bytes : {1, 63, 64, 65, 4096, 100000}) {
    std::byte* const piece = arena.take(bytes);
    EXPECT_EQ(arena.offset(piece) % (bytes >= Arena::kLargeBytes ? kPage : Arena::kAlign), 0u) << bytes;
    EXPECT_GE(arena.offset(piece), kPage) << "the first bytes are the caller's";
    EXPECT_TRUE(arena.holds(piece, bytes));
    std::memset(piece, 1, bytes);
    pieces[piece] = bytes;
  }
  const std::byte* end = arena.base();
  for (const auto& [piece, bytes] : pieces) {
    EXPECT_GE(piece, end);
    end = piece + bytes;
  }
  EXPECT_EQ(arena.base()[0], std::byte{0});
  EXPECT_FALSE(arena.holds(arena.base() + arena.capacity() - 1, 2));
  EXPECT_FALSE(arena.holds(&pieces, 1));
}

TEST(Arena, TheFirstGapThatFitsIsUsed) {
  Arena arena(1 << 20, 0);
  std::byte *const a = arena.take(256), *const b = arena.take(256), *const c = arena.take(64);
  EXPECT_EQ(arena.used_bytes(), 576u);
  arena.give(a);
  EXPECT_EQ(arena.warm_bytes(), 256u);
  EXPECT_EQ(arena.take(320), c + 64) << "too large for the gap";
  EXPECT_EQ(arena.take(128), a);
  EXPECT_EQ(arena.take(128), a + 128);
  EXPECT_EQ(arena.warm_bytes(), 0u);
  arena.give(b);
  EXPECT_EQ(arena.take(256), b);
}

TEST(Arena, FullIsAnErrorWithTheBytes) {
  Arena arena(64 << 10, 0);
  std::byte* const piece = arena.take(40 << 10);
  for (const std::size_t bytes : {std::size_t{30} << 10, std::size_t{1} << 62, ~std::size_t{0}}) {
    try {
      arena.take(bytes);
      ADD_FAILURE() << bytes;
    } catch (const IoError& error) {
      EXPECT_NE(std::string(error.what()).find(std::to_string(40 << 10)), std::string::npos) << error.what();
    }
  }
  arena.give(piece);
  EXPECT_EQ(arena.take(64 << 10), arena.base());
}

TEST(Arena, FreedMemoryGoesBackWhenItAddsUp) {
  Arena arena(64 << 20, 0);
  EXPECT_EQ(present(arena), 0u);
  std::byte* const kept = arena.take(Arena::kLargeBytes);
  std::byte* const large = arena.take(Arena::kWarmBytes);
  std::byte* const more = arena.take(1 << 20);
  EXPECT_EQ(present(arena), Arena::kLargeBytes + Arena::kWarmBytes + (1 << 20)) << "large pieces are there at once";
  std::memset(kept, 5, Arena::kLargeBytes);
  arena.give(large);
  EXPECT_EQ(arena.warm_bytes(), Arena::kWarmBytes) << "just as much as may stay";
  EXPECT_EQ(arena.take(Arena::kWarmBytes), large);
  arena.give(large);
  arena.give(more);
  EXPECT_EQ(arena.warm_bytes(), 0u);
  EXPECT_EQ(present(arena), Arena::kLargeBytes);
  EXPECT_EQ(kept[Arena::kLargeBytes - 1], std::byte{5});
  EXPECT_EQ(arena.take(64)[0], std::byte{0}) << "what came back is new";
}

TEST(Arena, APinnedPieceStays) {
  Arena arena(1 << 20, 0);
  std::byte *const a = arena.take(256), *const b = arena.take(256);
  arena.pin(a + 100);  // any address in it
  arena.give(a);
  EXPECT_NE(arena.take(256), a);
  arena.give(b);
  EXPECT_EQ(arena.take(256), b);
}

TEST(Arena, PeersSeeItsBytesAndAForkLeavesThem) {
  Arena arena(8 << 20, 0);
  std::byte* const piece = arena.take(5 << 20);
  std::memset(piece, 3, 5 << 20);
  const Mapping peer(arena.fd());
  ASSERT_EQ(peer.bytes(), arena.capacity());
  EXPECT_NE(peer.base(), arena.base());
  EXPECT_EQ(peer.base()[arena.offset(piece) + 77], std::byte{3});
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    arena.give(piece);  // the memory is its parent's
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(peer.base()[arena.offset(piece) + 77], std::byte{3});
}

TEST(Arena, OneMappingForAllWhoAsk) {
  Mappings mappings;
  Arena arena(1 << 20, 0, &mappings), other(1 << 20, 0, &mappings);
  EXPECT_EQ(mappings.of(arena.fd())->base(), arena.base());
  EXPECT_EQ(mappings.of(other.fd())->base(), other.base());
  EXPECT_NE(other.base(), arena.base());
}

TEST(Arena, DefaultCapacityHasRoomForAllMemoryAndAllRanks) {
  const std::size_t one = default_capacity(1);
  EXPECT_GT(one,
            static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)));
  EXPECT_LE(default_capacity(1 << 20) * (1 << 20), std::size_t{1} << 45) << "x86-64 has 2^47 bytes of addresses";
}

}  // namespace
}  // namespace zero::comm::shm::shm_arena_test
