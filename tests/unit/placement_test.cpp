// Where states go when budgets are short: the order in which they leave the device, what is refused, and that the
// smallest budget named is the smallest.
#include <gtest/gtest.h>

#include "config/byte_count.h"
#include "memory/placement.h"

namespace zero::memory {
namespace {

// A root of 1000 and eight units of 4000 elements each, fp32 on two ranks at stage 3, Adam: 36000 parameters, of which
// a rank keeps 18000, 4 bytes each, and moments of 8.
std::vector<GroupSize> sizes() {
  std::vector<GroupSize> groups{{.numel = 1000, .padded = 1024, .shard = 512, .members = 2, .root = true}};
  for (int i = 0; i < 8; ++i) groups.push_back({.numel = 4000, .padded = 4096, .shard = 2048, .members = 4});
  return groups;
}

FootprintRules rules(int stage = 3) { return {.stage = stage, .world = 2, .tile_numel = 8192}; }

constexpr std::int64_t kShards = 512 + 8 * 2048;
// Two units and the root are gathered, and as many reduced from the whole to a shard, at once.
constexpr std::int64_t kPassing = (1024 + 2 * 4096) * 4 + (1024 + 512 + 2 * (4096 + 2048)) * 4;

std::vector<GroupPlace> on_device() { return std::vector<GroupPlace>(9); }
Budgets budgets_of(std::int64_t device, std::int64_t activations = 0) {
  Budgets budgets;
  budgets.device = device;
  budgets.activations = activations;
  return budgets;
}
const Movable kAll{.optimizer = true, .parameters = true};

TEST(Footprint, OfStageThreeIsTheShardsAndTwoUnits) {
  const auto need = footprint(rules(), sizes(), on_device());
  EXPECT_EQ(need.total(Tier::Device), kShards * (4 + 4 + 8) + kPassing);
  EXPECT_EQ(need.total(Tier::Host), 0);
  EXPECT_EQ(need.total(Tier::File), 0);
}

TEST(Placement, WithRoomNothingMoves) {
  const auto placement = place(rules(), sizes(), on_device(), kAll, budgets_of(kShards * 16 + kPassing));
  EXPECT_TRUE(placement.fits);
  EXPECT_EQ(placement.places, on_device());
}

TEST(Placement, OptimizerStatesLeaveFirstAndNoMoreThanNeeded) {
  const auto placement = place(rules(), sizes(), on_device(), kAll, budgets_of(kShards * 16 + kPassing - 1));
  ASSERT_TRUE(placement.fits);
  int moved = 0;
  for (const auto& place : placement.places) {
    EXPECT_EQ(place.parameters, Tier::Device);
    moved += place.optimizer == Tier::Host;
  }
  EXPECT_EQ(moved, 1);
  // Its parameter was its own master: now it has one of its own, on the host.
  EXPECT_EQ(placement.need.total(Tier::Host), 2048 * (4 + 8 + 4));
}

TEST(Placement, ThenParameters) {
  const auto placement = place(rules(), sizes(), on_device(), kAll, budgets_of(kPassing + 1000 * 4));
  ASSERT_TRUE(placement.fits);
  int optimizer = 0, parameters = 0;
  for (const auto& place : placement.places) {
    optimizer += place.optimizer == Tier::Host;
    parameters += place.parameters == Tier::Host;
  }
  EXPECT_EQ(optimizer, 9);
  EXPECT_GE(parameters, 8);
}

TEST(Placement, WhatTheHostCannotHoldGoesToTheFileOnlyIfThereIsOne) {
  const Budgets short_of_host{.device = kPassing + 1000 * 4, .host = 500000};
  const auto without = place(rules(), sizes(), on_device(), kAll, {.device = short_of_host.device, .host = 200000});
  EXPECT_FALSE(without.fits);
  auto budgets = short_of_host;
  budgets.file = 10'000'000;
  const auto with = place(rules(), sizes(), on_device(), kAll, budgets);
  ASSERT_TRUE(with.fits);
  EXPECT_LE(with.need.total(Tier::Device), *budgets.device);
  EXPECT_LE(with.need.total(Tier::Host), *budgets.host);
}

TEST(Placement, TheSmallestBudgetNamedWorksAndOneByteLessDoesNot) {
  for (const int stage : {1, 2, 3}) {
    for (const auto tier : {Tier::Device, Tier::Host}) {
      Budgets budgets{.device = 300'000, .host = 300'000};
      (tier == Tier::Device ? budgets.device : budgets.host) = 1;
      (tier == Tier::Device ? budgets.host : budgets.device) = tier == Tier::Device ? 10'000'000 : 250'000;
      const auto refused = place(rules(stage), sizes(), on_device(), kAll, budgets);
      if (refused.fits) continue;
      const auto smallest = refused.smallest[MemoryReport::index(tier)];
      if (!smallest) continue;
      auto& budget = tier == Tier::Device ? budgets.device : budgets.host;
      budget = *smallest;
      EXPECT_TRUE(place(rules(stage), sizes(), on_device(), kAll, budgets).fits) << "stage " << stage;
      budget = *smallest - 1;
      EXPECT_FALSE(place(rules(stage), sizes(), on_device(), kAll, budgets).fits) << "stage " << stage;
    }
  }
}

TEST(Placement, WhatIsFixedStays) {
  auto first = on_device();
  for (auto& place : first) place.optimizer = Tier::Host;
  const auto placement = place(rules(), sizes(), first, {.parameters = true}, {.host = 1000, .file = 1'000'000'000});
  EXPECT_FALSE(placement.fits);
  EXPECT_EQ(placement.places[0].optimizer, Tier::Host);
}

TEST(Placement, OnADeviceWithKernelsOfItsOwnOptimizerStatesMoveTogether) {
  auto with_device = rules();
  with_device.on_cpu = false;
  const auto placement =
      place(with_device, sizes(), on_device(), {.optimizer = true, .parameters = true, .together = true},
            budgets_of(kShards * 16 + kPassing - 1));
  ASSERT_TRUE(placement.fits);
  for (const auto& place : placement.places) EXPECT_EQ(place.optimizer, Tier::Host);
}

TEST(Placement, RoomForActivationsCounts) {
  EXPECT_TRUE(place(rules(), sizes(), on_device(), {}, budgets_of(kShards * 16 + kPassing + 99, 99)).fits);
  EXPECT_FALSE(place(rules(), sizes(), on_device(), {}, budgets_of(kShards * 16 + kPassing + 99, 100)).fits);
}

TEST(Placement, TheTextNamesTiersBudgetsAndWhatMoved) {
  const auto budgets = budgets_of(kShards * 16 + kPassing - 1);
  const auto placement = place(rules(), sizes(), on_device(), kAll, budgets);
  std::vector<std::string> names{"root"};
  for (int i = 0; i < 8; ++i) names.push_back("blocks." + std::to_string(i));
  const auto text = describe(placement, budgets, sizes(), names);
  EXPECT_NE(text.find("of " + std::to_string(*budgets.device)), std::string::npos) << text;
  EXPECT_NE(text.find("optimizer states in host memory: blocks.7"), std::string::npos) << text;
}

TEST(ByteCount, AsPeopleWriteThem) {
  using config::byte_count;
  EXPECT_EQ(byte_count("0"), 0);
  EXPECT_EQ(byte_count("9223372036854775807"), 9223372036854775807);
  EXPECT_EQ(byte_count("2GB"), 2'000'000'000);
  EXPECT_EQ(byte_count("2GiB"), 2147483648);
  EXPECT_EQ(byte_count(" 1.5 gib "), 1610612736);
  EXPECT_EQ(byte_count("40g"), 40'000'000'000);
  EXPECT_EQ(byte_count("512KiB"), 524288);
  EXPECT_EQ(byte_count("3PB"), 3'000'000'000'000'000);
  for (const char* bad : {"", "GB", "-1", "1e9", "2 GB free", "2XB", "1.2.3", "999999PB", "nan", "0x10", ".5GB"})
    EXPECT_EQ(byte_count(bad), std::nullopt) << bad;
}

}  // namespace
}  // namespace zero::memory
