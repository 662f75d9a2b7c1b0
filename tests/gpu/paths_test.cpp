// The engine's use of the plug-in's table (sums on the device that are read for the norm, updates, conversions of
// accumulated gradients) without a GPU: host loops implement the table, and results must be bit-identical to those
// without it.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/tensor_arithmetic.h"
#include "gpu/host_kernels.h"
#include "parity/training.h"
#include "support/nightly.h"

namespace zero::test::paths_test {
namespace {

struct ByTable {
  ByTable() { engine::serve_host_memory_by(&host_kernels()); }
  ~ByTable() { engine::serve_host_memory_by(nullptr); }
};

// constants: different sets of constants of the parameters' updates.
void expect_same_by_table(const Training& setup, int constants = 1) {
  const auto name = setup.problem + " " + setup.recipe + ", world " + std::to_string(setup.world) + ", stage " +
                    std::to_string(setup.stage) + ", accumulation " + std::to_string(setup.accumulation);
  const auto plain = train_threads(setup);
  const auto before = host_kernel_calls();
  const ByTable by_table;
  const auto run = train_threads(setup);
  const auto after = host_kernel_calls();
  EXPECT_EQ(after.sums - before.sums, setup.world * setup.steps) << name << ": sums of squares, one launch a step";
  EXPECT_EQ(after.updates - before.updates, setup.world * (setup.steps - run.overflows) * constants)
      << name << ": updates, one launch for all groups";
  EXPECT_EQ(run.hash, plain.hash) << name;
  EXPECT_EQ(run.norms, plain.norms) << name;
  ASSERT_EQ(run.losses.size(), plain.losses.size()) << name;
  for (std::size_t i = 0; i < run.losses.size(); ++i)
    EXPECT_TRUE(run.losses[i] == plain.losses[i] || (std::isnan(run.losses[i]) && std::isnan(plain.losses[i])))
        << name << " step " << i << ": got " << run.losses[i] << ", expected " << plain.losses[i];
  EXPECT_EQ(run.overflows, plain.overflows) << name;
}

TEST(ByTheTable, EveryStageAndRecipeHasTheSameBits) {
  OneIn part(5);
  for (const char* recipe : {"fp32", "bf16", "fp16"})
    for (const int world : {1, 2})
      for (int stage = 0; stage <= 3; ++stage)
        for (const int accumulation : {1, 2}) {
          if (!part.take()) continue;
          Training setup;
          setup.recipe = recipe;
          setup.world = world;
          setup.stage = stage;
          setup.accumulation = accumulation;
          setup.steps = 3;
          setup.clip = 0.5;
          expect_same_by_table(setup);
        }
}

TEST(ByTheTable, EveryOptimizer) {
  for (const char* optimizer :
       {R"({"type": "Adam", "params": {"lr": 0.01, "adam_w_mode": false, "weight_decay": 0.05}})",
        R"({"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "nesterov": true}})",
        R"({"type": "SGD", "params": {"lr": 0.05}})", R"({"type": "Adagrad", "params": {"lr": 0.01}})",
        R"({"type": "Lion", "params": {"lr": 0.001, "weight_decay": 0.1}})"}) {
    Training setup;
    setup.optimizer = optimizer;
    setup.recipe = "bf16";
    setup.steps = 4;
    expect_same_by_table(setup);
  }
}

TEST(ByTheTable, ParameterGroupsHaveTheirOwnConstants) {
  for (const int world : {1, 2}) {
    Training setup;
    setup.world = world;
    setup.steps = 4;
    setup.extra = R"(, "libzero": {"parameter_groups": [{"pattern": "*bias", "weight_decay": 0, "lr": 0.03}]})";
    expect_same_by_table(setup, 2);
  }
}

// Gradients, parameters and sums of two dtypes in one launch.
TEST(ByTheTable, ParametersThatStayFp32) {
  for (const int world : {1, 2})
    for (const int stage : {0, 3}) {
      Training setup;
      setup.recipe = "bf16";
      setup.world = world;
      setup.stage = stage;
      setup.steps = 3;
      setup.extra = R"(, "libzero": {"keep_fp32": "*norm.*"})";
      expect_same_by_table(setup);
    }
}

TEST(ByTheTable, UnusedFrozenAndTinyParameters) {
  for (const char* name : {"branches", "frozen", "tiny"})
    for (const int world : {1, 2})
      for (const int stage : {0, 1, 3}) {
        Training setup;
        setup.problem = name;
        setup.world = world;
        setup.stage = stage;
        setup.steps = 3;
        expect_same_by_table(setup);
      }
}

// A learning rate so large that gradients overflow; the overflow is detected from sums on the device.
TEST(ByTheTable, OverflowsAreSeen) {
  for (const int world : {1, 2}) {
    Training setup;
    setup.recipe = "fp16";
    setup.world = world;
    setup.steps = 4;
    setup.stage = 2;
    setup.optimizer = R"({"type": "SGD", "params": {"lr": 1e8}})";
    const auto run = train_threads(setup);
    ASSERT_GT(run.overflows, 0);
    expect_same_by_table(setup);
  }
}

// The norm's exchange carries what must be equal on all ranks; nothing was updated when the difference is reported.
TEST(ByTheTable, RanksThatDifferAreToldBeforeAnythingChanges) {
  const ByTable by_table;
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto module = make_module(problem("mlp"));
    Training setup;
    setup.stage = 1;
    Engine engine(module, Options::from_json(json_of(setup)), comm);
    const auto before = module->parameters()[0].detach().clone();
    if (comm->rank() == 1) engine.set_lr(0, 0.5);
    engine.backward(loss_of(problem("mlp"), *module, comm->rank(), 0, at::kFloat));
    std::string text;
    try {
      engine.step();
    } catch (const ConfigError& error) {
      text = error.what();
    }
    EXPECT_NE(text.find("other rates of set_lr(), on rank 0 than on rank 1"), std::string::npos) << text;
    EXPECT_TRUE(at::equal(module->parameters()[0], before));
  });
}

}  // namespace
}  // namespace zero::test::paths_test
