// Bytes by purpose and tier: current, peak, and budgets.
#include "step/memory_ledger.h"

#include <gtest/gtest.h>
#include <zero/errors.h>

namespace zero::step::ledger_test {
namespace {

TEST(Ledger, CountsByPurposeAndTier) {
  MemoryLedger ledger;
  ledger.book(Tier::Device, Purpose::Gradients, 100);
  ledger.book(Tier::Host, Purpose::Gradients, 7);
  ledger.book(Tier::Device, Purpose::Gradients, -40);
  const auto report = ledger.report();
  EXPECT_EQ(report.current(Tier::Device, Purpose::Gradients), 60u);
  EXPECT_EQ(report.current(Tier::Device), 60u);
  EXPECT_EQ(report.current(Tier::Host), 7u);
  EXPECT_EQ(report.current(Tier::File), 0u);
}

// The peak of a tier is its highest sum at one moment: less than the sum of the purposes' peaks.
TEST(Ledger, PeaksStay) {
  MemoryLedger ledger;
  ledger.book(Tier::Device, Purpose::GatherBuffers, 100);
  ledger.book(Tier::Device, Purpose::GatherBuffers, -90);
  ledger.book(Tier::Device, Purpose::ReduceBuffers, 50);
  ledger.book(Tier::Device, Purpose::ReduceBuffers, -50);
  ledger.book(Tier::Device, Purpose::ReduceBuffers, 1);
  auto report = ledger.report();
  EXPECT_EQ(report.peak(Tier::Device, Purpose::GatherBuffers), 100u);
  EXPECT_EQ(report.peak(Tier::Device, Purpose::ReduceBuffers), 50u);
  EXPECT_EQ(report.peak(Tier::Device), 100u);
  EXPECT_EQ(report.current(Tier::Device), 11u);
  ledger.reset_peak();
  report = ledger.report();
  EXPECT_EQ(report.peak(Tier::Device), 11u);
  EXPECT_EQ(report.peak(Tier::Device, Purpose::GatherBuffers), 10u);
}

TEST(Ledger, RebookingIsNoHigherSum) {
  MemoryLedger ledger;
  ledger.book(Tier::Device, Purpose::Activations, 100);
  ledger.limit(Tier::Device, 100, "memory.device", "rank 0/1");
  ledger.rebook(Tier::Device, Purpose::Activations, Purpose::Gradients, 80);
  const auto report = ledger.report();
  EXPECT_EQ(report.peak(Tier::Device), 100u);
  EXPECT_EQ(report.current(Tier::Device, Purpose::Activations), 20u);
  EXPECT_EQ(report.peak(Tier::Device, Purpose::Gradients), 80u);
}

// A free may be seen before its allocation: one purpose below zero makes no room for another.
TEST(Ledger, BelowZeroCountsAsNothing) {
  MemoryLedger ledger;
  ledger.book(Tier::Device, Purpose::Activations, -30);
  ledger.book(Tier::Device, Purpose::Parameters, 50);
  EXPECT_EQ(ledger.report().current(Tier::Device), 50u);
  EXPECT_EQ(ledger.report().current(Tier::Device, Purpose::Activations), 0u);
}

TEST(Ledger, ABudgetIsKeptToTheByte) {
  MemoryLedger ledger;
  ledger.book(Tier::Host, Purpose::OptimizerStates, 60);
  ledger.limit(Tier::Host, 100, "memory.host", "rank 1/2");
  ledger.book(Tier::Host, Purpose::Other, 40);
  ledger.book(Tier::Device, Purpose::Other, 1000);
  try {
    ledger.book(Tier::Host, Purpose::Gradients, 1);
    FAIL() << "one byte above the budget";
  } catch (const ConfigError& e) {
    EXPECT_EQ(e.code(), ExitCode::kOutOfMemory);
    for (const std::string part : {"memory.host", "1 more bytes", "100 held", "rank 1/2"})
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << part << " in " << e.what();
  }
  EXPECT_EQ(ledger.report().current(Tier::Host), 100u);
  EXPECT_EQ(ledger.report().peak(Tier::Host, Purpose::Gradients), 0u);
  ledger.book(Tier::Host, Purpose::Other, -1);
  ledger.book(Tier::Host, Purpose::Gradients, 1);
}

}  // namespace
}  // namespace zero::step::ledger_test
