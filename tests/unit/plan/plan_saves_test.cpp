// Host memory of saves in a plan: what a save in the background may hold for its writer, and snapshots
// that ranks keep.
#include <gtest/gtest.h>
#include <zero/plan.h>

#include <string>

#include "config/settings.h"

namespace zero::plan_saves_test {
namespace {

constexpr auto kHost = MemoryReport::Tier::Host;
constexpr auto kOther = MemoryReport::Purpose::Other;

Plan plan_of(const std::string& keys, int stage = 2) {
  PlanMachine machine;
  machine.gpu = false;
  machine.ranks_per_host = 2;
  const auto options = Options::from_json(
      R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": )" +
      std::to_string(stage) + "}" + keys + "}");
  return plan(PlanModel::named("gpt-10m"), options, machine);
}

const std::string kBehind = R"(, "checkpoint": {"writer": {"decoupled": true}})";

// Masters and two moments of half of the model.
constexpr std::uint64_t kShard = 9'968'384ull / 2 * 12;

TEST(PlanSaves, ASaveInTheBackgroundHoldsItsPoolAtMost) {
  const auto plain = plan_of("").memory;
  ASSERT_EQ(plain.peak(kHost, kOther), 0u);
  const auto small = plan_of(kBehind + R"(, "libzero": {"checkpoint_memory": 16777216})").memory;
  EXPECT_EQ(small.peak(kHost, kOther), 16777216u);
  EXPECT_EQ(small.peak(kHost), plain.peak(kHost) + 16777216u);
  EXPECT_EQ(small.current(kHost, kOther), 0u) << "between saves it is free";
  // A pool that is larger than the states is not filled. Shards are padded.
  const auto large = plan_of(kBehind + R"(, "libzero": {"checkpoint_memory": 1073741824})").memory;
  EXPECT_GE(large.peak(kHost, kOther), kShard);
  EXPECT_LE(large.peak(kHost, kOther), kShard + (std::uint64_t{1} << 16));
  // Updates wait rather than exceed a budget, so it is no reason to refuse.
  const auto budget = plan_of(kBehind + R"(, "memory": {"host": 1000000})");
  EXPECT_EQ(budget.refusal, "");
  EXPECT_EQ(budget.memory.peak(kHost, kOther), 1000000u);
}

TEST(PlanSaves, KeptSnapshotsAreTwoCopiesOfWhatARankStores) {
  const std::string keep = R"(, "libzero": {"keep_snapshot_every": 10, "checkpoint_memory": 16777216})";
  for (const int stage : {0, 2}) {
    const auto plain = plan_of("", stage).memory, kept = plan_of(keep, stage).memory;
    const auto shard = stage == 0 ? 2 * kShard : kShard;
    EXPECT_GE(kept.current(kHost, kOther), 2 * shard);
    EXPECT_LE(kept.current(kHost, kOther), 2 * shard + (std::uint64_t{1} << 17));
    EXPECT_EQ(kept.peak(kHost) - plain.peak(kHost), kept.current(kHost, kOther) + 16777216) << "and a pool";
    EXPECT_EQ(kept.peak(MemoryReport::Tier::Device), plain.peak(MemoryReport::Tier::Device));
  }
  // Part of what a budget must hold.
  EXPECT_EQ(plan_of(keep + R"(, "memory": {"host": 140000000})").refusal, "");
  const auto refusal = plan_of(keep + R"(, "memory": {"host": 100000000})").refusal;
  EXPECT_NE(refusal.find("memory.host"), std::string::npos) << refusal;
}

}  // namespace
}  // namespace zero::plan_saves_test
