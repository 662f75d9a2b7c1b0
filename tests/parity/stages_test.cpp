// The same bits: for one world size and recipe, the state after 20 steps does not depend on the
// stage, on prefetching, or on delays. With accumulation there are two families, {0, 1} (summed
// over micro-batches first) and {2, 3} (over ranks first).
#include <gtest/gtest.h>

#include "parity/training.h"
#include "support/random_delays.h"

namespace zero::test::stages_test {
namespace {

struct Case {
  int world;
  const char* recipe;
  double clip;
};

class SameBits : public ::testing::TestWithParam<Case> {};

TEST_P(SameBits, AcrossStagesPrefetchAndDelays) {
  const auto param = GetParam();
  Training setup;
  setup.world = param.world;
  setup.recipe = param.recipe;
  setup.clip = param.clip;
  setup.stage = 0;
  const auto reference = train_threads(setup);
  ASSERT_EQ(reference.losses.size(), 20u);
  EXPECT_LT(reference.losses.back(), reference.losses.front());
  for (int stage = 1; stage <= 3; ++stage) {
    for (const bool prefetch : {true, false}) {
      if (stage < 3 && !prefetch) continue;
      setup.stage = stage;
      setup.prefetch = prefetch;
      const auto run = train_threads(setup, random_delays(static_cast<unsigned>(stage * 2 + prefetch)));
      EXPECT_EQ(run.hash, reference.hash) << "stage " << stage << " prefetch " << prefetch;
      EXPECT_EQ(run.losses, reference.losses);
      EXPECT_EQ(run.norms, reference.norms);
      EXPECT_TRUE(equal_bits(run.masters, reference.masters));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, SameBits,
                         ::testing::Values(Case{1, "fp32", 0}, Case{1, "bf16", 0.1}, Case{2, "fp32", 0},
                                           Case{2, "fp32", 0.1}, Case{2, "bf16", 0}, Case{2, "bf16", 0.1},
                                           Case{2, "fp16", 0}, Case{2, "fp16", 0.1}, Case{3, "fp32", 0.1},
                                           Case{3, "bf16", 0.1}, Case{3, "fp16", 0}, Case{4, "fp32", 0.1},
                                           Case{4, "bf16", 0}, Case{4, "fp16", 0.1}),
                         [](const auto& info) {
                           return std::string(info.param.recipe) + "_world" + std::to_string(info.param.world) +
                                  (info.param.clip > 0 ? "_clipped" : "");
                         });

TEST(SameBits, TwoFamiliesWithAccumulation) {
  for (const char* recipe : {"fp32", "bf16", "fp16"}) {
    for (const int world : {2, 3}) {
      Training setup;
      setup.accumulation = 3;
      setup.recipe = recipe;
      setup.world = world;
      setup.clip = 0.1;
      Outcome runs[4];
      for (int stage = 0; stage < 4; ++stage) {
        setup.stage = stage;
        runs[stage] = train_threads(setup, random_delays(static_cast<unsigned>(stage)));
      }
      EXPECT_EQ(runs[0].hash, runs[1].hash) << recipe << " world " << world;
      EXPECT_EQ(runs[2].hash, runs[3].hash) << recipe << " world " << world;
      // The families differ in rounding only.
      for (std::size_t i = 0; i < runs[0].losses.size(); ++i)
        EXPECT_NEAR(runs[0].losses[i], runs[2].losses[i],
                    (std::string(recipe) == "fp32" ? 1e-4 : 3e-2) * runs[0].losses[i]);
    }
  }
}

TEST(SameBits, EveryOptimizer) {
  for (const char* optimizer :
       {R"({"type": "Adam", "params": {"lr": 0.01, "adam_w_mode": false, "weight_decay": 0.1}})",
        R"({"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "nesterov": true}})",
        R"({"type": "SGD", "params": {"lr": 0.05}})", R"({"type": "Lion", "params": {"lr": 0.001}})",
        R"({"type": "Adagrad", "params": {"lr": 0.01}})"}) {
    Training setup;
    setup.steps = 6;
    setup.optimizer = optimizer;
    setup.stage = 0;
    const auto reference = train_threads(setup);
    for (int stage = 1; stage < 4; ++stage) {
      setup.stage = stage;
      EXPECT_EQ(train_threads(setup).hash, reference.hash) << optimizer << " stage " << stage;
    }
  }
}

TEST(SameBits, ReductionAndAccumulationTypes) {
  for (const char* extra : {R"(, "communication_data_type": "fp32")", R"(, "data_types": {"grad_accum_dtype": "fp32"})",
                            R"(, "prescale_gradients": true)", R"(, "gradient_predivide_factor": 2.0)",
                            R"(, "gradient_allreduce_op": "sum")"}) {
    Training setup;
    setup.steps = 6;
    setup.recipe = "bf16";
    setup.extra = extra;
    setup.stage = 0;
    const auto reference = train_threads(setup);
    for (int stage = 1; stage < 4; ++stage) {
      setup.stage = stage;
      EXPECT_EQ(train_threads(setup).hash, reference.hash) << extra << " stage " << stage;
    }
  }
}

}  // namespace
}  // namespace zero::test::stages_test
