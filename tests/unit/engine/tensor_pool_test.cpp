// engine/tensor_pool.h: which buffer a request gets, and what is booked for it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include <zero/errors.h>

#include "engine/tensor_pool.h"

namespace zero::engine {
namespace {

class Pool : public testing::Test {
 protected:
  std::uint64_t booked() const { return ledger_.report().current(step::Tier::Device, step::Purpose::GatherBuffers); }
  step::MemoryLedger ledger_;
  std::vector<std::int64_t> made_;  // bytes, in order
  TensorPool pool_{[this](std::int64_t numel, at::ScalarType dtype) {
                     made_.push_back(numel);
                     return at::empty({numel}, dtype);
                   },
                   ledger_, step::Purpose::GatherBuffers};
};

TEST_F(Pool, ASteadyStateAllocatesNothing) {
  for (int step = 0; step < 3; ++step) {
    auto a = pool_.take(100, at::kFloat), b = pool_.take(60, at::kBFloat16);
    EXPECT_EQ(a.numel(), 100);
    EXPECT_EQ(a.scalar_type(), at::kFloat);
    EXPECT_EQ(b.numel(), 60);
    EXPECT_EQ(b.scalar_type(), at::kBFloat16);
    EXPECT_NE(a.const_data_ptr(), b.const_data_ptr());
    pool_.put(a);
    pool_.put(b);
  }
  EXPECT_EQ(made_, (std::vector<std::int64_t>{400, 120}));
  EXPECT_EQ(booked(), 520u) << "idle buffers are owned, too";
}

TEST_F(Pool, TheSmallestThatFitsIsTaken) {
  auto large = pool_.take(1000, at::kByte), middle = pool_.take(500, at::kByte), small = pool_.take(100, at::kByte);
  const void *of_large = large.const_data_ptr(), *of_middle = middle.const_data_ptr();
  for (auto* one : {&small, &large, &middle}) pool_.put(*one);
  const auto a = pool_.take(300, at::kByte);
  EXPECT_EQ(a.const_data_ptr(), of_middle);
  EXPECT_EQ(a.numel(), 300) << "no more than was asked for";
  EXPECT_EQ(pool_.take(300, at::kByte).const_data_ptr(), of_large);
  EXPECT_EQ(made_.size(), 3u);
}

TEST_F(Pool, AnIdleOneThatIsTooSmallMakesRoom) {
  pool_.put(pool_.take(100, at::kByte));
  const auto larger = pool_.take(200, at::kByte);
  EXPECT_EQ(booked(), 200u);
  pool_.put(larger);
  pool_.put(pool_.take(100, at::kByte));
  EXPECT_EQ(made_, (std::vector<std::int64_t>{100, 200})) << "settles on the largest";
  EXPECT_EQ(ledger_.report().peak(step::Tier::Device), 200u) << "first freed, then made";
}

TEST_F(Pool, TrimFreesWhatIsIdle) {
  const auto used = pool_.take(10, at::kFloat);
  pool_.put(pool_.take(20, at::kFloat));
  EXPECT_EQ(booked(), 120u);
  pool_.trim();
  EXPECT_EQ(booked(), 40u);
  pool_.put(used);
  pool_.trim();
  EXPECT_EQ(booked(), 0u);
}

TEST_F(Pool, WhatItDoesNotOwnAndWhatIsGivenTwiceAreErrors) {
  const auto used = pool_.take(10, at::kFloat);
  EXPECT_THROW(pool_.put(at::empty({10})), InternalError);
  EXPECT_THROW(pool_.put(used.narrow(0, 1, 9)), InternalError);
  pool_.put(used);
  EXPECT_THROW(pool_.put(used), InternalError);
}

TEST_F(Pool, ARefusedBookingLeavesNothing) {
  ledger_.limit(step::Tier::Device, 100, "memory.device", "rank 0/1");
  const auto used = pool_.take(100, at::kByte);
  EXPECT_THROW(pool_.take(1, at::kByte), ConfigError);
  EXPECT_EQ(booked(), 100u);
  pool_.put(used);
  EXPECT_EQ(pool_.take(1, at::kByte).const_data_ptr(), used.const_data_ptr());
}

TEST(PoolOfALedger, GivesItsBookingBackAtTheEnd) {
  step::MemoryLedger ledger;
  {
    TensorPool pool([](std::int64_t numel, at::ScalarType dtype) { return at::empty({numel}, dtype); }, ledger,
                    step::Purpose::ReduceBuffers);
    const auto used = pool.take(8, at::kFloat), idle = pool.take(8, at::kFloat);
    pool.put(idle);
    EXPECT_EQ(ledger.report().current(step::Tier::Device, step::Purpose::ReduceBuffers), 64u);
  }
  EXPECT_EQ(ledger.report().current(step::Tier::Device), 0u);
}

}  // namespace
}  // namespace zero::engine
