// Budgets: for any budget the bits are the same and no tier exceeds it. An infeasible budget is refused before the
// first step, with the smallest feasible one.
#include <gtest/gtest.h>

#include <filesystem>

#include "parity/budget_stack.h"

namespace zero::test::budget_test {
namespace {

using Tier = MemoryReport::Tier;
using Purpose = MemoryReport::Purpose;

struct Ended {
  std::string hash;
  MemoryReport memory;
};

// Rank 0's state after some steps.
Ended train(const Training& setup) {
  Ended ended;
  run_ranks(setup.world, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    const auto& task = problem(setup.problem);
    auto module = make_module(task);
    Engine engine(module, Options::from_json(json_of(setup)), comm);
    for (int k = 0; k < setup.steps * setup.accumulation; ++k) {
      engine.backward(loss_of(task, *module, comm->rank(), k, dtype_of(setup)));
      engine.step();
    }
    const auto memory = engine.memory();
    const auto hash = engine.state_hash();
    if (comm->rank() == 0) ended = {hash, memory};
  });
  return ended;
}

// The error that refuses a setup; empty: it was not refused.
std::string refusal(const Training& setup) {
  try {
    train(setup);
  } catch (const ConfigError& e) {
    EXPECT_EQ(e.code(), ExitCode::kOutOfMemory) << e.what();
    return e.what();
  }
  return "";
}

class Budgets : public ::testing::TestWithParam<std::tuple<int, const char*>> {
 protected:
  Training setup() const {
    Training s;
    s.stage = std::get<0>(GetParam());
    s.recipe = std::get<1>(GetParam());
    s.steps = 4;
    return s;
  }
  const std::string folder_ = std::filesystem::temp_directory_path().string();
};

// From an unlimited budget down to one that is refused: states move to host memory and files, and keep their values.
TEST_P(Budgets, ShrinkUntilRefusedAndTheBitsStay) {
  const auto free_run = train(setup());
  const auto activations = free_run.memory.peak(Tier::Device, Purpose::Activations);
  const auto keys = [&](std::int64_t device) {
    return memory_keys("\"device\": " + std::to_string(device) + ", \"activations\": " + std::to_string(activations));
  };
  auto s = setup();
  s.extra = keys(static_cast<std::int64_t>(activations) + 1);
  const auto text = refusal(s);
  ASSERT_NE(text, "");
  const auto smallest = named(text, "device");
  ASSERT_GT(smallest, static_cast<std::int64_t>(activations)) << text;
  s.extra = keys(smallest - 1);
  EXPECT_NE(refusal(s), "");
  std::uint64_t most_on_host = 0;
  const auto whole = static_cast<std::int64_t>(free_run.memory.peak(Tier::Device));
  for (const auto budget :
       {smallest, smallest + (std::max(whole, smallest) - smallest) / 2, std::max(whole, smallest) * 2}) {
    s.extra = keys(budget);
    const auto run = train(s);
    EXPECT_EQ(run.hash, free_run.hash) << budget;
    EXPECT_LE(run.memory.peak(Tier::Device), static_cast<std::uint64_t>(budget));
    most_on_host = std::max(most_on_host, run.memory.peak(Tier::Host));
    if (budget >= 2 * whole) {
      EXPECT_EQ(run.memory.peak(Tier::Host), 0u);
    }
  }
  if (setup().stage == 0) return;
  EXPECT_GT(most_on_host, 0u);

  // The same device budget, and less host memory than before: the rest is moved to a file.
  const auto with_file = [&](std::int64_t host) {
    return memory_keys("\"device\": " + std::to_string(smallest) + ", \"activations\": " + std::to_string(activations) +
                       ", \"host\": " + std::to_string(host) + ", \"file\": \"1GB\", \"nvme_path\": \"" + folder_ +
                       "\"");
  };
  s.extra = with_file(1);
  const auto host_text = refusal(s);
  const auto smallest_host = named(host_text, "host");
  ASSERT_GT(smallest_host, 0) << host_text;
  s.extra = with_file(smallest_host);
  const auto run = train(s);
  EXPECT_EQ(run.hash, free_run.hash);
  EXPECT_LE(run.memory.peak(Tier::Device), static_cast<std::uint64_t>(smallest));
  EXPECT_LE(run.memory.peak(Tier::Host), static_cast<std::uint64_t>(smallest_host));
}

INSTANTIATE_TEST_SUITE_P(StagesAndRecipes, Budgets,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3), ::testing::Values("fp32", "bf16")));

TEST(Budget, AnActivationThatWouldBreakItIsRefusedWhereItIsMade) {
  Training s;
  s.world = 1;
  s.steps = 1;
  s.stage = 0;
  s.extra = memory_keys("\"device\": " + std::to_string(train(s).memory.peak(Tier::Device) - 1));
  const auto text = refusal(s);
  EXPECT_NE(text.find("memory.activations"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 0/1"), std::string::npos) << text;
}

TEST(Budget, WhatAnOffloadBlockPlacesStays) {
  Training s;
  s.steps = 2;
  s.zero = R"(, "offload_optimizer": {"device": "cpu"})";
  s.extra = memory_keys(R"("device": "1GB", "host": "2KB", "file": "1GB", "nvme_path": ")" +
                        std::filesystem::temp_directory_path().string() + "\"");
  const auto text = refusal(s);
  EXPECT_NE(text.find("memory.host: got 2000 bytes"), std::string::npos) << text;
}

// --- a run that starts is not refused in a step ------------------------------------------------

std::string with_smallest(const Training& setup, const std::string& tier = "device") {
  return trains_with_the_smallest_budget(setup, tier, [&](const auto& body) { run_ranks(setup.world, body); });
}

Training stack(int world, int stage, const std::string& zero) {
  Training s;
  s.world = world;
  s.stage = stage;
  s.steps = 3;
  s.zero = zero;
  return s;
}

TEST(SmallestBudget, ThreeReductionsAtOnceHaveRoom) {
  EXPECT_EQ(with_smallest(stack(4, 2, R"(, "overlap_comm": true)")), "");
}

TEST(SmallestBudget, OneRanksReductionsHaveRoom) {
  auto s = stack(1, 0, "");
  s.recipe = "bf16";
  s.accumulation = 2;
  EXPECT_EQ(with_smallest(s), "");
}

TEST(SmallestBudget, UnitsThatAreKeptForTheirNextUseHaveRoom) {
  EXPECT_EQ(with_smallest(stack(2, 3, R"(, "stage3_max_reuse_distance": 1000000000)")), "");
}

TEST(SmallestBudget, TilesOfParametersInFilesHaveRoom) {
  const auto folder = std::filesystem::temp_directory_path().string();
  EXPECT_EQ(
      with_smallest(
          stack(2, 3, R"(, "offload_param": {"device": "nvme", "max_in_cpu": 0, "nvme_path": ")" + folder + "\"}"),
          "host"),
      "");
}

}  // namespace
}  // namespace zero::test::budget_test
