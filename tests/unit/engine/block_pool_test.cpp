// engine/block_pool.h: sizes that are served, blocks that come back late, and what is booked.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "engine/block_pool.h"

namespace zero::engine {
namespace {

class Blocks : public testing::Test {
 protected:
  Blocks() {
    pool_ = std::make_shared<BlockPool>(
        [this](std::int64_t bytes) {
          if (full_) throw std::runtime_error("full");
          ++made_;
          return at::empty({bytes}, at::kByte);
        },
        ledger_, step::Purpose::Gradients);
  }
  std::uint64_t booked() const { return ledger_->report().current(step::Tier::Device, step::Purpose::Gradients); }
  bool full_ = false;
  int made_ = 0;
  std::shared_ptr<step::MemoryLedger> ledger_ = std::make_shared<step::MemoryLedger>();
  std::shared_ptr<BlockPool> pool_;
};

TEST_F(Blocks, OnlyServedSizesAndOnlyWhileOpen) {
  EXPECT_EQ(pool_->take(64), nullptr) << "neither served nor open";
  pool_->serve(64);
  EXPECT_EQ(pool_->take(64), nullptr) << "not open";
  pool_->open(true);
  EXPECT_NE(pool_->take(64), nullptr);
  EXPECT_EQ(pool_->take(65), nullptr) << "not served";
  pool_->open(false);
  EXPECT_EQ(pool_->take(64), nullptr);
  EXPECT_EQ(made_, 1);
  EXPECT_EQ(booked(), 64u);
}

TEST_F(Blocks, BlocksOfASizeAreUsedAgain) {
  pool_->open(true);
  for (const std::int64_t bytes : {64, 128}) pool_->serve(bytes);
  void *const a = pool_->take(64), *const b = pool_->take(64), *const other = pool_->take(128);
  EXPECT_NE(a, b);
  pool_->give(a);
  EXPECT_NE(pool_->take(128), a) << "of another size";
  EXPECT_EQ(pool_->take(64), a);
  EXPECT_EQ(made_, 4);
  EXPECT_EQ(booked(), 64u * 2 + 128 * 2);
  pool_->give(other);
  EXPECT_EQ(booked(), 64u * 2 + 128 * 2) << "idle blocks are owned, too";
}

TEST_F(Blocks, MakeGivesAnySizeAndTakesItBackWithTheTensor) {
  void* data = nullptr;
  {
    const auto tensor = pool_->make(10, at::kBFloat16);
    EXPECT_EQ(tensor.numel(), 10);
    EXPECT_EQ(tensor.scalar_type(), at::kBFloat16);
    data = tensor.mutable_data_ptr();
    EXPECT_EQ(booked(), 20u);
  }
  pool_->open(true);
  pool_->serve(20);
  EXPECT_EQ(pool_->take(20), data);
  EXPECT_EQ(made_, 1);
}

TEST_F(Blocks, TrimLeavesWhatIsInUse) {
  pool_->open(true);
  pool_->serve(64);
  void *const used = pool_->take(64), *const idle = pool_->take(64);
  pool_->give(idle);
  pool_->trim();
  EXPECT_EQ(booked(), 64u);
  pool_->give(used);
  EXPECT_EQ(pool_->take(64), used) << "it came back after the trim";
}

TEST_F(Blocks, WithoutMemoryTheOrdinaryAllocatorIsAsked) {
  pool_->open(true);
  pool_->serve(64);
  full_ = true;
  EXPECT_EQ(pool_->take(64), nullptr);
  EXPECT_THROW(pool_->make(64, at::kByte), std::runtime_error) << "this one has no other way";
  full_ = false;
  ledger_->limit(step::Tier::Device, 63, "memory.device", "rank 0/1");
  EXPECT_EQ(pool_->take(64), nullptr) << "refused by the ledger";
  EXPECT_EQ(booked(), 0u);
}

TEST_F(Blocks, ATensorKeepsThePoolAlive) {
  auto tensor = pool_->make(16, at::kFloat);
  const std::weak_ptr<BlockPool> pool = pool_;
  pool_.reset();
  EXPECT_FALSE(pool.expired());
  tensor.fill_(3);
  tensor.reset();
  EXPECT_TRUE(pool.expired());
  EXPECT_EQ(booked(), 0u);
}

TEST_F(Blocks, ThreadsNeverShareABlock) {
  pool_->open(true);
  pool_->serve(64);
  std::vector<std::thread> threads;
  for (unsigned char t = 1; t <= 4; ++t)
    threads.emplace_back([this, t] {
      for (int i = 0; i < 500; ++i) {
        auto* const block = static_cast<unsigned char*>(pool_->take(64));
        std::fill(block, block + 64, t);
        std::this_thread::yield();
        EXPECT_EQ(std::count(block, block + 64, t), 64);
        pool_->give(block);
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_LE(made_, 4);
}

}  // namespace
}  // namespace zero::engine
