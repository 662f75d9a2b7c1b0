// The keys that keep parameters unsharded at stage 3 and trade memory for traffic. The bits are the same for every
// policy, the bytes follow the formulas of docs/memory.md, and the limits hold.
#include <gtest/gtest.h>

#include <mutex>

#include "parity/training.h"

namespace zero::test::policy_test {
namespace {

struct Seen {
  std::string hash;  // of the states, unit by unit
  std::map<std::string, at::Tensor> masters;
  std::uint64_t gathered = 0, reduced = 0;  // bytes sent by rank 0 in its last step
  std::int64_t numel = 0, persistent = 0, peak = 0, largest_group = 0;
  std::uint64_t reduce_peak = 0;
  std::size_t groups = 0;
};

Seen train(const std::string& zero, int accumulation = 1, int stage = 3) {
  Training setup;
  setup.stage = stage;
  setup.problem = "padded_free_gpt";
  setup.accumulation = accumulation;
  setup.clip = 0.1;
  setup.zero = zero;
  Seen seen;
  std::mutex mutex;
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    const auto& task = problem(setup.problem);
    auto module = make_module(task);
    Engine engine(module, Options::from_json(json_of(setup)), comm);
    for (int step = 0; step < 5; ++step) {
      comm->reset_stats();
      engine.reset_peak_memory();
      for (int micro = 0; micro < accumulation; ++micro) {
        engine.backward(loss_of(task, *module, comm->rank(), step * accumulation + micro, at::kFloat));
        engine.step();
      }
      if (step == 2) {  // an evaluation in between changes nothing
        at::NoGradGuard no_grad;
        loss_of(task, *module, comm->rank(), 100, at::kFloat);
      }
    }
    auto stats = comm->stats();
    const auto peak = engine.memory().peak(MemoryReport::Tier::Device, MemoryReport::Purpose::GatherBuffers);
    const auto hash = engine.state_hash();
    auto masters = engine.full_state_dict();
    std::lock_guard lock(mutex);
    if (comm->rank() != 0) return;
    seen.hash = hash;
    seen.masters = std::move(masters);
    seen.gathered = stats.by_op["all_gather"].bytes_sent;
    seen.reduced = stats.by_op["reduce_scatter"].bytes_sent;
    seen.peak = static_cast<std::int64_t>(peak);
    seen.reduce_peak = engine.memory().peak(MemoryReport::Tier::Device, MemoryReport::Purpose::ReduceBuffers);
    for (const auto& [name, numel] : engine.units()) {
      ++seen.groups;
      seen.largest_group = std::max(seen.largest_group, static_cast<std::int64_t>(numel));
      seen.numel += numel;
      if (name == "persistent") seen.persistent = numel;
    }
  });
  return seen;
}

std::string bucket_of(std::int64_t limit) { return ", \"reduce_bucket_size\": " + std::to_string(limit); }

std::uint64_t half(std::int64_t elements) { return static_cast<std::uint64_t>(elements) * 4 / 2; }

TEST(Policy, WithoutAKeyEverythingIsGatheredTwice) {
  const auto seen = train("");
  EXPECT_EQ(seen.gathered, 2 * half(seen.numel));
  EXPECT_EQ(seen.reduced, half(seen.numel));
  EXPECT_EQ(seen.persistent, 0);
}

TEST(Policy, SmallParametersStayAsAtStage2) {
  const auto plain = train("");
  for (const int k : {1, 3}) {
    const auto K = static_cast<std::uint64_t>(k);
    const auto seen = train(R"(, "stage3_param_persistence_threshold": 200)", k);
    EXPECT_GT(seen.persistent, 0);
    EXPECT_LT(seen.persistent, seen.numel);
    EXPECT_EQ(seen.gathered, 2 * K * half(seen.numel - seen.persistent) + half(seen.persistent));
    EXPECT_EQ(seen.reduced, K * half(seen.numel));
    // Other units, so another hash of the same states.
    EXPECT_TRUE(equal_bits(seen.masters, k == 1 ? plain.masters : train("", k).masters));
  }
  const auto capped =
      train(R"(, "stage3_param_persistence_threshold": 200, "stage3_model_persistence_threshold": 300)");
  EXPECT_GT(capped.persistent, 0);
  EXPECT_LT(capped.persistent, train(R"(, "stage3_param_persistence_threshold": 200)").persistent);
  EXPECT_TRUE(equal_bits(capped.masters, plain.masters));
}

TEST(Policy, AReuseDistanceOfTheModelGathersOnceAPass) {
  const auto plain = train("");
  for (const int k : {1, 3}) {
    const auto seen = train(R"(, "stage3_max_reuse_distance": 1000000000)", k);
    EXPECT_EQ(seen.gathered, static_cast<std::uint64_t>(k) * half(seen.numel));
    if (k == 1) EXPECT_EQ(seen.hash, plain.hash);
    EXPECT_GT(seen.peak, plain.peak);
  }
}

TEST(Policy, AShortReuseDistanceKeepsWhatBackwardWantsFirst) {
  const auto plain = train(""), all = train(R"(, "stage3_max_reuse_distance": 1000000000)");
  const auto some = train(R"(, "stage3_max_reuse_distance": 1)");
  EXPECT_EQ(some.hash, plain.hash);
  EXPECT_LT(some.gathered, plain.gathered);
  EXPECT_GT(some.gathered, all.gathered);
}

// Beyond the limit no unit is prefetched or kept unsharded; the unit in use and the root always are.
TEST(Policy, LiveParametersAreLimited) {
  const auto plain = train("");
  const auto tight = train(R"(, "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 1000000000)");
  EXPECT_EQ(tight.hash, plain.hash);
  EXPECT_EQ(tight.gathered, plain.gathered);
  EXPECT_LT(tight.peak, plain.peak) << "a second unit was gathered ahead";
}

TEST(Policy, AReductionHasAtMostABucketOfElements) {
  const auto plain = train("");
  const auto one_each = train(R"(, "reduce_bucket_size": 0)");
  EXPECT_TRUE(equal_bits(one_each.masters, plain.masters));
  EXPECT_EQ(one_each.groups, one_each.masters.size());
  const auto limit = plain.largest_group / 4;
  for (const int stage : {0, 1, 2, 3}) {
    const auto whole = train("", 1, stage), cut = train(bucket_of(limit), 1, stage);
    EXPECT_TRUE(equal_bits(cut.masters, plain.masters)) << "stage " << stage;
    EXPECT_GT(cut.groups, whole.groups);
    EXPECT_LT(cut.groups, one_each.groups);
    if (stage >= 2) EXPECT_LT(cut.reduce_peak, whole.reduce_peak) << "stage " << stage;
    std::size_t over = 0;  // a parameter larger than the limit goes alone
    for (const auto& [name, value] : cut.masters) over += value.numel() > limit ? 1 : 0;
    EXPECT_GT(over, 0U);
    EXPECT_GE(cut.largest_group, limit);
  }
}

TEST(Policy, PublishingWithinALimitChangesNoBits) {
  for (const int stage : {1, 2}) {
    const auto plain = train("", 1, stage), one = train(R"(, "allgather_bucket_size": 1)", 1, stage);
    EXPECT_EQ(one.hash, plain.hash);
    EXPECT_EQ(one.gathered, plain.gathered);
  }
}

}  // namespace
}  // namespace zero::test::policy_test
