// The GPT model alone, without the engine: published sizes, its loss against libtorch's, causality,
// dtypes and sampling.
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <limits>
#include <set>

#include "models/gpt.h"

namespace gpt_test {
namespace {

models::GptConfig small(bool tied = true) {
  return {.layers = 2, .hidden = 32, .heads = 4, .sequence = 16, .vocabulary = 50, .tied_output = tied};
}

at::Tensor some_tokens(std::int64_t batch, std::int64_t time, std::int64_t vocabulary) {
  return torch::randint(vocabulary, {batch, time}, torch::kLong);
}

std::int64_t counted(models::Gpt& model) {
  std::set<const void*> seen;
  std::int64_t total = 0;
  for (const at::Tensor& p : model->parameters())
    if (seen.insert(p.unsafeGetTensorImpl()).second) total += p.numel();
  return total;
}

TEST(GptTest, PresetsHaveThePublishedNumberOfParameters) {
  EXPECT_EQ(models::GptConfig::preset("gpt2").num_parameters(), 124439808);
  EXPECT_EQ(models::GptConfig::preset("gpt2-medium").num_parameters(), 354823168);
  EXPECT_EQ(models::GptConfig::preset("gpt2-large").num_parameters(), 774030080);
  EXPECT_EQ(models::GptConfig::preset("gpt2-xl").num_parameters(), 1557611200);
  EXPECT_THROW(models::GptConfig::preset("gpt2-huge"), std::invalid_argument);
}

TEST(GptTest, FormulaCountsWhatTheModuleHolds) {
  for (const bool tied : {true, false}) {
    models::Gpt model(small(tied));
    EXPECT_EQ(counted(model), small(tied).num_parameters()) << tied;
  }
  // The smallest published one as a real module, not by formula alone.
  models::Gpt gpt2(models::GptConfig::preset("gpt2"));
  EXPECT_EQ(counted(gpt2), 124439808);
  models::Gpt tiny(models::GptConfig::preset("gpt-1m"));
  EXPECT_NEAR(static_cast<double>(counted(tiny)), 1e6, 1e5);
}

// GPT-2 (Radford et al., 2019, 2.3): projections into the residual stream are scaled by 1/sqrt of their number.
TEST(GptTest, WeightsAreDrawnWithTheDeviationOfTheConfiguration) {
  for (const double deviation : {0.02, 0.3}) {
    torch::manual_seed(7);
    models::GptConfig config{.layers = 3, .hidden = 96, .heads = 4, .sequence = 64, .vocabulary = 300};
    config.tied_output = false;
    config.deviation = deviation;
    const models::Gpt model(config);
    int projections = 0;
    for (const auto& item : model->named_parameters()) {
      const auto& name = item.key();
      const at::Tensor values = item.value().detach().to(torch::kFloat64);
      if (values.dim() == 1) {
        const bool scale = name.find("norm") != std::string::npos && name.ends_with("weight");
        EXPECT_TRUE(values.eq(scale ? 1 : 0).all().item<bool>()) << name;
        continue;
      }
      const bool into = name.ends_with("projection.weight") || name.ends_with("down.weight");
      projections += into;
      const double expected = into ? deviation / std::sqrt(6.0) : deviation;
      // Five standard deviations of the measured one, of at least 6144 elements.
      const double limit = 5 / std::sqrt(2.0 * static_cast<double>(values.numel()));
      EXPECT_NEAR(values.std().item<double>() / expected, 1, limit) << name;
      EXPECT_NEAR(values.mean().item<double>() / expected, 0, 5 / std::sqrt(static_cast<double>(values.numel())))
          << name;
    }
    EXPECT_EQ(projections, 6);
  }
  models::GptConfig bad = small();
  bad.deviation = 0;
  EXPECT_THROW(models::Gpt{bad}, std::invalid_argument);
}

TEST(GptTest, StartsAtTheEntropyOfAUniformGuess) {
  torch::manual_seed(1);
  models::Gpt model(small());
  const at::Tensor tokens = some_tokens(8, 16, 50), targets = some_tokens(8, 16, 50);
  EXPECT_NEAR(model->forward(tokens, targets).item<double>(), std::log(50.0), 0.1);
}

TEST(GptTest, LossAndGradientsAreThoseOfLibtorch) {
  torch::manual_seed(2);
  // More rows than are taken at once, and a number of them that leaves a remainder.
  const at::Tensor targets = torch::randint(1000, {777}, torch::kLong);
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16, torch::kHalf}) {
    at::Tensor ours = (3 * torch::randn({777, 1000})).to(dtype).requires_grad_();
    at::Tensor plain = ours.detach().to(torch::kFloat64).requires_grad_();
    const at::Tensor loss = models::cross_entropy(ours, targets);
    const at::Tensor expected = torch::nn::functional::cross_entropy(plain, targets);
    EXPECT_EQ(loss.scalar_type(), torch::kFloat32);
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-5);
    (loss * 5).backward();
    (expected * 5).backward();
    EXPECT_EQ(ours.grad().scalar_type(), dtype);
    const at::Tensor gap = (ours.grad().to(torch::kFloat64) - plain.grad()).abs();
    const double step = dtype == torch::kFloat32 ? 1e-6 : dtype == torch::kBFloat16 ? 1.0 / 256 : 1.0 / 2048;
    // Relative rounding of the dtype, and fp16's spacing below its normal numbers.
    EXPECT_LE((gap - plain.grad().abs() * step).max().item<double>(), dtype == torch::kHalf ? 3e-8 : 1e-9);
  }
}

TEST(GptTest, SeesNothingOfTheFuture) {
  torch::manual_seed(3);
  models::Gpt model(small());
  model->eval();
  torch::NoGradGuard no_grad;
  at::Tensor tokens = some_tokens(1, 16, 50);
  const at::Tensor before = model->forward(tokens);
  tokens = tokens.clone();
  tokens[0][10] = (tokens[0][10] + 1) % 50;
  const at::Tensor after = model->forward(tokens);
  EXPECT_TRUE(at::equal(before.narrow(1, 0, 10), after.narrow(1, 0, 10)));
  EXPECT_FALSE(at::allclose(before.select(1, 10), after.select(1, 10)));
  EXPECT_FALSE(at::allclose(before.select(1, 15), after.select(1, 15)));
}

TEST(GptTest, FollowsTheDtypeOfItsParameters) {
  torch::manual_seed(4);
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    models::Gpt model(small());
    const at::Tensor tokens = some_tokens(4, 16, 50), targets = some_tokens(4, 16, 50);
    const double full = model->forward(tokens, targets).item<double>();
    model->to(dtype);
    EXPECT_EQ(model->forward(tokens).scalar_type(), dtype);
    const at::Tensor loss = model->forward(tokens, targets);
    EXPECT_EQ(loss.scalar_type(), torch::kFloat32);
    EXPECT_NEAR(loss.item<double>(), full, 0.02);
    loss.backward();
    for (const auto& item : model->named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
      EXPECT_EQ(item.value().grad().scalar_type(), dtype) << item.key();
    }
  }
}

TEST(GptTest, LearnsASequenceByHeart) {
  torch::manual_seed(5);
  models::Gpt model(small());
  const at::Tensor tokens = some_tokens(2, 17, 50);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3));
  double loss_value = 0;
  for (int step = 0; step < 150; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = model->forward(tokens.narrow(1, 0, 16), tokens.narrow(1, 1, 16));
    loss.backward();
    optimizer.step();
    loss_value = loss.item<double>();
  }
  EXPECT_LT(loss_value, 0.1);
  const at::Tensor said = model->generate(tokens.narrow(1, 0, 4), 13, {.temperature = 0});
  EXPECT_TRUE(at::equal(said, tokens));
}

TEST(GptTest, SamplingHasItsOwnGeneratorAndKeepsToTheTopK) {
  torch::manual_seed(6);
  models::Gpt model(small());
  const at::Tensor start = some_tokens(1, 3, 50);
  torch::manual_seed(7);
  const at::Tensor expected = torch::rand({4});
  torch::manual_seed(7);
  // Longer than the model's sequence length: it continues with the last `sequence` tokens.
  const at::Tensor one = model->generate(start, 30, {.seed = 1});
  EXPECT_TRUE(at::equal(torch::rand({4}), expected)) << "torch's generator moved";
  EXPECT_EQ(one.size(1), 33);
  EXPECT_TRUE(at::equal(one.narrow(1, 0, 3), start));
  EXPECT_TRUE(at::equal(one, model->generate(start, 30, {.seed = 1})));
  EXPECT_FALSE(at::equal(one, model->generate(start, 30, {.seed = 2})));
  EXPECT_TRUE(at::equal(model->generate(start, 30, {.top_k = 1, .seed = 3}),
                        model->generate(start, 30, {.temperature = 0, .seed = 4})));
  EXPECT_TRUE(model->is_training());
}

TEST(GptTest, RefusesImpossibleShapes) {
  const auto with = [](auto change) {
    models::GptConfig config = small();
    change(config);
    return config;
  };
  EXPECT_THROW(models::Gpt(with([](auto& c) { c.heads = 5; })), std::invalid_argument);
  EXPECT_THROW(models::Gpt(with([](auto& c) { c.layers = 0; })), std::invalid_argument);
  EXPECT_THROW(models::Gpt(with([](auto& c) { c.dropout = 1; })), std::invalid_argument);
  models::Gpt model(small());
  EXPECT_THROW(model->forward(some_tokens(1, 17, 50)), c10::Error);
  EXPECT_THROW(model->forward(some_tokens(2, 8, 50), some_tokens(2, 7, 50)), c10::Error);
}

}  // namespace
}  // namespace gpt_test
