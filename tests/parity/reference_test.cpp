// Correctness: compared with libtorch on the joined batch.
#include <gtest/gtest.h>

#include <ATen/Version.h>

#include "parity/training.h"

namespace zero::test::reference_test {
namespace {

TEST(Reference, WorldOfOneEqualsAPlainLoopBitForBit) {
  if (at::get_cpu_capability() == "DEFAULT")
    GTEST_SKIP() << "torch rounds its fused AdamW otherwise here (docs/numerics.md)";
  Training setup;
  setup.problem = "aligned_gpt";  // every size a multiple of 16: see docs/numerics.md for the tails
  setup.world = 1;
  const auto plain = train_plain(setup);
  for (int stage = 0; stage <= 3; ++stage) {
    setup.stage = stage;
    const auto run = train_threads(setup);
    std::string first;
    EXPECT_TRUE(equal_bits(run.masters, plain.masters, &first)) << "stage " << stage << ", first different: " << first;
    EXPECT_EQ(run.losses, plain.losses);
  }
}

// One process, both ranks' samples in one batch.
std::vector<double> joined_batch_losses(int steps, int world) {
  at::set_num_threads(1);
  const auto& task = problem("joined_gpt");
  auto module = make_module(task);
  auto parameters = module->parameters();
  std::vector<at::Tensor> data, exp_avg, exp_avg_sq, counts;
  for (auto& p : parameters) {
    data.push_back(p.detach());
    exp_avg.push_back(at::zeros_like(p.detach()));
    exp_avg_sq.push_back(at::zeros_like(p.detach()));
    counts.push_back(at::zeros({}));
  }
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    auto loss = joined_loss(task, *module, world, step);
    losses.push_back(loss.item<double>());
    loss.backward();
    at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].grad().defined()) continue;
      counts[i] += 1;
      at::_fused_adamw_({data[i]}, {parameters[i].grad()}, {exp_avg[i]}, {exp_avg_sq[i]}, {}, {counts[i]}, 0.01, 0.9,
                        0.999, 0.05, 1e-8, false, false);
      parameters[i].mutable_grad() = at::Tensor();
    }
  }
  return losses;
}

TEST(Reference, FiftyStepsAtWorldTwoFollowTheJoinedBatch) {
  const auto plain = joined_batch_losses(50, 2);
  const struct {
    const char* recipe;
    double bound;  // relative, of the loss
  } cases[] = {{"fp32", 1e-5}, {"bf16", 3e-2}, {"fp16", 1e-2}};
  for (const auto& c : cases) {
    for (int stage = 0; stage <= 3; ++stage) {
      Training setup;
      setup.problem = "joined_gpt";
      setup.steps = 50;
      setup.recipe = c.recipe;
      setup.stage = stage;
      const auto run = train_threads(setup);
      ASSERT_EQ(run.losses.size(), plain.size());
      for (std::size_t i = 0; i < plain.size(); ++i)
        EXPECT_NEAR(run.losses[i], plain[i], c.bound * plain[i]) << c.recipe << " stage " << stage << " step " << i;
    }
  }
  EXPECT_LT(plain.back(), 0.9 * plain.front());
}

}  // namespace
}  // namespace zero::test::reference_test
