// step/memory.h: the buffer for a request, its bookings, and its release.
#include <gtest/gtest.h>
#include <zero/errors.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "step/memory.h"

namespace zero::step::step_memory_test {
namespace {

// Buffers as numbers that are there or not.
class Buffers : public BufferOps {
 public:
  void allocate(int buffer, const Allocation& allocation) override {
    if (full) throw std::runtime_error("full");
    const std::lock_guard lock(mutex);
    made.push_back(allocation.bytes);
    there[buffer] = allocation.place;
  }
  void free(int buffer) override {
    const std::lock_guard lock(mutex);
    EXPECT_EQ(there.erase(buffer), 1u) << "freed twice, or never made";
  }
  bool full = false;
  std::mutex mutex;
  std::vector<std::int64_t> made;  // bytes, in order
  std::map<int, Place> there;
};

class MemoryTest : public testing::Test {
 protected:
  std::uint64_t booked(Purpose purpose) const { return ledger_.report().current(Tier::Device, purpose); }
  std::uint64_t unsharded() const { return booked(Purpose::GatherBuffers); }
  View take(std::int64_t numel) { return memory_->take(Memory::kUnshard, numel, Dtype::U8); }
  void put(View view) { memory_->put(Memory::kUnshard, view); }

  Buffers buffers_;
  MemoryLedger ledger_;
  std::unique_ptr<Memory> memory_ = std::make_unique<Memory>(buffers_, ledger_, /*checksums=*/true);
};

// --- pools ------------------------------------------------------------------------------------

TEST_F(MemoryTest, ASteadyStateAllocatesNothing) {
  for (int step = 0; step < 3; ++step) {
    auto a = memory_->take(Memory::kUnshard, 100, Dtype::F32), b = memory_->take(Memory::kUnshard, 60, Dtype::BF16);
    EXPECT_EQ(a.numel, 100);
    EXPECT_EQ(b.dtype, Dtype::BF16);
    EXPECT_NE(a.buffer, b.buffer);
    memory_->put(Memory::kUnshard, a);
    memory_->put(Memory::kUnshard, b);
    EXPECT_FALSE(a) << "who gave it back has it no more";
  }
  EXPECT_EQ(buffers_.made, (std::vector<std::int64_t>{400, 120}));
  EXPECT_EQ(unsharded(), 520u) << "idle buffers are owned, too";
}

TEST_F(MemoryTest, TheSmallestThatFitsIsTaken) {
  const auto large = take(1000), middle = take(500), small = take(100);
  for (const auto& view : {small, large, middle}) put(view);
  EXPECT_EQ(take(300).buffer, middle.buffer);
  EXPECT_EQ(take(300).buffer, large.buffer);
  EXPECT_EQ(buffers_.made.size(), 3u);
}

TEST_F(MemoryTest, AnIdleOneThatIsTooSmallMakesRoom) {
  put(take(100));
  const auto larger = take(200);
  EXPECT_EQ(unsharded(), 200u);
  put(larger);
  put(take(100));
  EXPECT_EQ(buffers_.made, (std::vector<std::int64_t>{100, 200})) << "settles on the largest";
  EXPECT_EQ(ledger_.report().peak(Tier::Device), 200u) << "first freed, then made";
}

TEST_F(MemoryTest, PoolsShareNothing) {
  put(take(100));
  memory_->take(Memory::kReduce, 100, Dtype::U8);
  EXPECT_EQ(buffers_.made.size(), 2u);
  EXPECT_EQ(booked(Purpose::ReduceBuffers), 100u);
}

TEST_F(MemoryTest, WhatItDoesNotOwnAndWhatIsGivenTwiceAreErrors) {
  const auto used = take(10);
  EXPECT_THROW(put({used.buffer + 1, 0, 10, Dtype::U8}), InternalError);
  put(used);
  EXPECT_THROW(put(used), InternalError);
}

TEST_F(MemoryTest, ARefusedBookingLeavesNothing) {
  ledger_.limit(Tier::Device, 100, "memory.device", "rank 0/1");
  const auto used = take(100);
  EXPECT_THROW(take(1), ConfigError);
  EXPECT_EQ(unsharded(), 100u);
  EXPECT_EQ(buffers_.there.size(), 1u);
  put(used);
  EXPECT_EQ(take(1).buffer, used.buffer);
}

TEST_F(MemoryTest, WithoutMemoryNothingIsBooked) {
  buffers_.full = true;
  EXPECT_THROW(take(8), std::runtime_error);
  EXPECT_THROW(memory_->rest({}, 8, Dtype::F32), std::runtime_error);
  EXPECT_EQ(ledger_.report().current(Tier::Device), 0u);
}

TEST_F(MemoryTest, TrimFreesWhatIsIdle) {
  const auto used = take(40);
  put(take(80));
  EXPECT_EQ(unsharded(), 120u);
  memory_->trim();
  EXPECT_EQ(unsharded(), 40u);
  put(used);
  memory_->trim();
  EXPECT_EQ(unsharded(), 0u);
  EXPECT_TRUE(buffers_.there.empty());
}

// --- at rest ----------------------------------------------------------------------------------

TEST_F(MemoryTest, WhatRestsIsBookedWhereItRests) {
  auto masters =
      memory_->rest({.tier = Tier::Host, .purpose = Purpose::MasterParameters, .role = Role::Master}, 10, Dtype::F32);
  const auto file =
      memory_->rest({.place = Place::File, .tier = Tier::File, .purpose = Purpose::OptimizerStates}, 1025, Dtype::F32);
  const auto report = ledger_.report();
  EXPECT_EQ(report.current(Tier::Host, Purpose::MasterParameters), 40u);
  EXPECT_EQ(report.current(Tier::File, Purpose::OptimizerStates), 8192u) << "whole blocks";
  EXPECT_EQ(report.current(Tier::Host, Purpose::Other), 16u) << "a checksum a block";
  EXPECT_EQ(file.numel, 1025);
  ASSERT_EQ(memory_->resting().size(), 2u);
  EXPECT_EQ(memory_->resting()[0].role, Role::Master);
  memory_->give(masters);
  EXPECT_FALSE(masters);
  memory_->give(masters);  // nothing
  EXPECT_EQ(memory_->resting().size(), 1u);
  EXPECT_EQ(ledger_.report().current(Tier::Host, Purpose::MasterParameters), 0u);
}

// --- blocks -----------------------------------------------------------------------------------

TEST_F(MemoryTest, OnlyServedSizesAndOnlyWhileOpen) {
  EXPECT_FALSE(memory_->serves(64)) << "neither served nor open";
  memory_->serve(64);
  EXPECT_FALSE(memory_->serves(64)) << "not open";
  memory_->open_blocks(true);
  EXPECT_TRUE(memory_->serves(64));
  EXPECT_FALSE(memory_->serves(65));
  memory_->open_blocks(false);
  EXPECT_FALSE(memory_->serves(64));
}

TEST_F(MemoryTest, BlocksOfASizeAreUsedAgain) {
  memory_->serve_blocks(Purpose::Gradients);
  const int a = memory_->take_block(64), b = memory_->take_block(64), other = memory_->take_block(128);
  EXPECT_NE(a, b);
  memory_->give_block(a);
  EXPECT_NE(memory_->take_block(128), a) << "of another size";
  EXPECT_EQ(memory_->take_block(64), a);
  EXPECT_EQ(buffers_.made.size(), 4u);
  memory_->give_block(other);
  EXPECT_EQ(booked(Purpose::Gradients), 64u * 2 + 128 * 2) << "idle blocks are owned, too";
  memory_->trim();
  EXPECT_EQ(booked(Purpose::Gradients), 64u * 2 + 128) << "those in use stay";
}

TEST_F(MemoryTest, ABlockMayComeBackAfterTheEnd) {
  memory_->rest({}, 8, Dtype::F32);
  const int used = memory_->take_block(64), idle = memory_->take_block(64);
  memory_->give_block(idle);
  put(take(10));
  memory_->close();
  EXPECT_EQ(buffers_.there.size(), 1u) << "all but the block in use";
  EXPECT_EQ(ledger_.report().current(Tier::Device), 64u);
  memory_->give_block(used);
  memory_.reset();
  EXPECT_TRUE(buffers_.there.empty());
  EXPECT_EQ(ledger_.report().current(Tier::Device), 0u);
}

TEST_F(MemoryTest, ThreadsNeverShareABuffer) {
  std::map<int, std::atomic<int>> users;
  for (int id = 0; id < 20; ++id) users[id] = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        const int block = memory_->take_block(64);
        auto view = take(32);
        for (const int id : {block, view.buffer}) EXPECT_EQ(++users.at(id), 1);
        std::this_thread::yield();
        for (const int id : {block, view.buffer}) --users.at(id);
        put(view);
        memory_->give_block(block);
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_LE(buffers_.made.size(), 8u);
}

}  // namespace
}  // namespace zero::step::step_memory_test
