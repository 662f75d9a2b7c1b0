// Parts of the models for Hugging Face's weights, without transformers: the fused passes against libtorch's operators
// in fp64, ignored targets, segments, masks, tokens that arrive in pieces, and how often tokens are drawn.
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "models/bert.h"
#include "models/cross_entropy.h"
#include "models/fused.h"
#include "models/generation.h"
#include "models/llama.h"
#include "models/t5.h"

namespace layers_test {
namespace {

models::LlamaConfig small_llama() {
  models::LlamaConfig config;
  config.layers = 3, config.hidden = 32, config.heads = 4, config.kv_heads = 2, config.inner = 40;
  config.sequence = 32, config.vocabulary = 50, config.deviation = 0.2;
  return config;
}

using Call = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

// Result and gradients of `ours` in dtype, compared with those of `plain` in fp64.
void compare(const Call& ours, const Call& plain, std::vector<at::Tensor> inputs, at::ScalarType dtype, double limit) {
  std::vector<at::Tensor> narrow, wide;
  for (const at::Tensor& input : inputs) {
    narrow.push_back(input.to(dtype).detach().requires_grad_());
    wide.push_back(narrow.back().detach().to(torch::kFloat64).requires_grad_());
  }
  const at::Tensor y = ours(narrow), expected = plain(wide);
  ASSERT_EQ(y.sizes(), expected.sizes());
  ASSERT_EQ(y.scalar_type(), dtype);
  const at::Tensor slope = torch::randn(y.sizes()).to(dtype);
  y.backward(slope);
  expected.backward(slope.to(torch::kFloat64));
  const auto gap = [](const at::Tensor& a, const at::Tensor& b) {
    return ((a.to(torch::kFloat64) - b).abs().max() / b.abs().max()).item<double>();
  };
  EXPECT_LE(gap(y, expected), limit);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_EQ(narrow[i].grad().scalar_type(), dtype);
    EXPECT_LE(gap(narrow[i].grad(), wide[i].grad()), limit) << i;
  }
}

TEST(LayersTest, FusedPassesAreTheirFormulas) {
  torch::manual_seed(1);
  for (const auto& [dtype, limit] :
       {std::pair{torch::kFloat32, 2e-6}, {torch::kBFloat16, 2e-2}, {torch::kHalf, 3e-3}}) {
    // Widths that fill vectors and that do not, and more rows than a part of the weight's gradient has.
    for (const std::int64_t width : {64, 37, 8}) {
      compare([](const auto& in) { return models::rms_norm(in[0], in[1], 1e-6); },
              [](const auto& in) { return in[1] * in[0] * (in[0].square().mean(-1, true) + 1e-6).rsqrt(); },
              {torch::randn({3, 100, width}), torch::randn({width})}, dtype, limit);
      compare([](const auto& in) { return models::gated_silu(in[0], in[1]); },
              [](const auto& in) { return torch::silu(in[0]) * in[1]; },
              {5 * torch::randn({7, width}), torch::randn({7, width})}, dtype, limit);
    }
    for (const bool batched : {false, true}) {
      const at::Tensor half = torch::randn(batched ? at::IntArrayRef{2, 5, 8} : at::IntArrayRef{5, 8});
      const at::Tensor angles = torch::cat({half, half}, -1);
      const at::Tensor cos = angles.cos().to(dtype), sin = angles.sin().to(dtype);
      compare([&](const auto& in) { return models::rotate_halves(in[0].transpose(1, 2), cos, sin); },
              [&](const auto& in) {
                const at::Tensor x = in[0].transpose(1, 2);
                const at::Tensor c = cos.to(torch::kFloat64), s = sin.to(torch::kFloat64);
                const at::Tensor turned = torch::cat({-x.narrow(-1, 8, 8), x.narrow(-1, 0, 8)}, -1);
                return x * (batched ? c.unsqueeze(1) : c) + turned * (batched ? s.unsqueeze(1) : s);
              },
              {torch::randn({2, 5, 3, 16})}, dtype, limit);
    }
  }
  // Beyond the range of exp, and what is no number.
  const float infinite = std::numeric_limits<float>::infinity();
  const at::Tensor x = torch::tensor({-1e4f, -90.f, 90.f, 1e4f, infinite});
  EXPECT_TRUE(
      at::allclose(models::gated_silu(x, torch::ones(x.sizes())), torch::tensor({0.f, 0.f, 90.f, 1e4f, infinite})));
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16}) {
    const at::Tensor bad = torch::full({1, 16}, std::numeric_limits<double>::quiet_NaN()).to(dtype);
    EXPECT_TRUE(models::gated_silu(bad, bad).isnan().all().item<bool>());
    EXPECT_TRUE(models::rms_norm(bad, torch::ones({16}).to(dtype), 1e-6).isnan().all().item<bool>());
  }
}

// Of one operator after the other, none of which multiplies and adds at once.
TEST(LayersTest, FusedPassesContractNothing) {
  torch::manual_seed(6);
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16}) {
    const at::Tensor half = torch::randn({9, 16}), angles = torch::cat({half, half}, -1);
    const at::Tensor cos = angles.cos().to(dtype), sin = angles.sin().to(dtype);
    const auto result_and_gradient = [&](const auto& rotate) {
      torch::manual_seed(7);
      const at::Tensor x = torch::randn({2, 9, 3, 32}).to(dtype).requires_grad_();
      const at::Tensor y = rotate(x.transpose(1, 2));
      y.backward(torch::randn(y.sizes()).to(dtype));
      return std::pair{y.detach(), x.grad()};
    };
    const auto ours = result_and_gradient([&](const at::Tensor& x) { return models::rotate_halves(x, cos, sin); });
    const auto plain = result_and_gradient([&](const at::Tensor& x) {
      return x * cos + torch::cat({-x.narrow(-1, 16, 16), x.narrow(-1, 0, 16)}, -1) * sin;
    });
    EXPECT_TRUE(at::equal(ours.first, plain.first)) << dtype;
    EXPECT_TRUE(at::equal(ours.second, plain.second)) << dtype;
  }
  // Sixteen sums of every sixteenth product, which are then added in their order.
  const at::Tensor x = torch::randn({500, 32}), weight = torch::randn({32});
  const at::Tensor lanes = x.narrow(1, 0, 16).square() + x.narrow(1, 16, 16).square();
  at::Tensor sum = torch::zeros({500});
  for (std::int64_t lane = 0; lane < 16; ++lane) sum = sum + lanes.select(1, lane);
  const at::Tensor scale = (sum / 32 + 1e-6f).rsqrt();  // libtorch's sqrt is not correctly rounded
  EXPECT_TRUE(at::equal(models::rms_norm(x, weight, 1e-6), weight * (x * scale.unsqueeze(1))));
  // A weight that stays fp32: the product is rounded once.
  const at::Tensor narrow = x.to(torch::kBFloat16);
  const at::Tensor expected = models::rms_norm(narrow.to(torch::kFloat32), weight, 1e-6);
  const at::Tensor mixed = models::rms_norm(narrow, weight, 1e-6);
  EXPECT_EQ(mixed.scalar_type(), torch::kBFloat16);
  EXPECT_TRUE(at::allclose(mixed.to(torch::kFloat32), expected, /*rtol=*/0.004, /*atol=*/1e-6));
  // An embedding that stays fp32 before a norm that does not: what follows takes the norm's dtype.
  const at::Tensor after = models::rms_norm(x, weight.to(torch::kBFloat16), 1e-6);
  EXPECT_EQ(after.scalar_type(), torch::kBFloat16);
  const at::Tensor scaled = (x * (x.square().mean(-1, true) + 1e-6).rsqrt()).to(torch::kBFloat16);
  EXPECT_TRUE(at::allclose(after, weight.to(torch::kBFloat16) * scaled, /*rtol=*/0.008, /*atol=*/1e-6));
}

// Where all dtypes are one the bits are libtorch's. Else they are those of fp32, rounded once.
TEST(LayersTest, LayerNormTakesOtherDtypesThanItsOwn) {
  torch::manual_seed(2);
  auto norm = models::make_layer_norm(32, 1e-6);
  {
    const torch::NoGradGuard no_grad;
    norm->weight.normal_(), norm->bias.normal_();
  }
  const at::Tensor x = torch::randn({20, 32}), weight = norm->weight.detach().clone(),
                   bias = norm->bias.detach().clone();
  const auto types = {torch::kFloat32, torch::kBFloat16};
  for (const auto of_x : types)
    for (const auto of_weight : types)
      for (const auto of_bias : types) {
        norm->weight.set_data(weight.to(of_weight)), norm->bias.set_data(bias.to(of_bias));
        const at::Tensor input = x.to(of_x, /*non_blocking=*/false, /*copy=*/true).requires_grad_();
        const at::Tensor y = norm(input);
        const bool single = of_x == torch::kFloat32 && of_weight == of_x && of_bias == of_x;
        ASSERT_EQ(y.scalar_type(), single ? torch::kFloat32 : torch::kBFloat16);
        at::Tensor expected;
        if (of_x == of_weight && of_x == of_bias)
          expected = torch::layer_norm(input, {32}, norm->weight, norm->bias, 1e-6);
        else
          expected = torch::layer_norm(input.to(torch::kFloat32), {32}, norm->weight.to(torch::kFloat32),
                                       norm->bias.to(torch::kFloat32), 1e-6)
                         .to(torch::kBFloat16);
        EXPECT_TRUE(at::equal(y, expected));
        y.sum().backward();
        EXPECT_EQ(input.grad().scalar_type(), of_x);
        EXPECT_EQ(norm->weight.grad().scalar_type(), of_weight);
        norm->weight.mutable_grad().reset(), norm->bias.mutable_grad().reset();
      }
}

TEST(LayersTest, IgnoredTargetsDoNotCount) {
  torch::manual_seed(2);
  at::Tensor logits = torch::randn({300, 1000}).requires_grad_(), same = logits.detach().clone().requires_grad_();
  at::Tensor targets = torch::randint(1000, {300}, torch::kLong);
  targets = targets.masked_fill(torch::rand({300}) < 0.4, models::kIgnored);
  const at::Tensor loss = models::cross_entropy(logits, targets);
  const at::Tensor expected = torch::nn::functional::cross_entropy(same, targets);
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-6);
  loss.backward();
  expected.backward();
  EXPECT_TRUE(at::allclose(logits.grad(), same.grad(), 1e-5, 1e-8));
  const at::Tensor none = models::cross_entropy(logits, torch::full({300}, models::kIgnored, torch::kLong));
  EXPECT_EQ(none.item<double>(), 0);
  // BERT computes the vocabulary for masked places only.
  models::BertConfig config;
  config.hidden = 32, config.heads = 2, config.inner = 48, config.vocabulary = 60, config.sequence = 16;
  config.dropout = config.attention_dropout = 0;
  models::BertForMaskedLM bert(config);
  const at::Tensor tokens = torch::randint(60, {2, 9}, torch::kLong);
  const at::Tensor masked = tokens.masked_fill(torch::rand({2, 9}) < 0.7, models::kIgnored);
  EXPECT_NEAR(bert->loss({tokens}, masked).item<double>(),
              models::cross_entropy(bert->forward(tokens).flatten(0, 1), masked.flatten()).item<double>(), 1e-5);
  EXPECT_EQ(bert->loss({tokens}, torch::full_like(tokens, models::kIgnored)).item<double>(), 0);
}

template <class Model, class Loss>
void segments_change_nothing(Model& model, const Loss& loss) {
  const auto gradients = [&] {
    model->zero_grad();
    const at::Tensor value = loss();
    value.backward();
    std::vector<at::Tensor> all{value.detach()};
    for (const at::Tensor& p : model->parameters()) all.push_back(p.grad().clone());
    return all;
  };
  const auto plain = gradients();
  int calls = 0;
  model->run_layers_by(2, [&](const models::Segment& segment, const at::Tensor& x) {
    ++calls;
    return segment(x);
  });
  const auto again = gradients();
  EXPECT_GE(calls, 2);
  ASSERT_EQ(plain.size(), again.size());
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(plain[i], again[i])) << i;
}

TEST(LayersTest, SegmentsComputeTheSame) {
  torch::manual_seed(3);
  const at::Tensor tokens = torch::randint(50, {2, 12}, torch::kLong);
  models::Llama llama(small_llama());
  segments_change_nothing(llama, [&] { return llama->loss(tokens, tokens.roll(-1, 1)); });
  models::T5Config config;
  config.vocabulary = 50, config.dropout = 0, config.encoder_layers = 3;
  models::T5ForConditionalGeneration t5(config);
  segments_change_nothing(t5, [&] { return t5->loss(tokens, tokens.flip(1)); });
}

TEST(LayersTest, TokensMayArriveInPieces) {
  torch::manual_seed(4);
  models::Llama model(small_llama());
  const torch::NoGradGuard no_grad;
  const at::Tensor tokens = torch::randint(50, {2, 20}, torch::kLong);
  const at::Tensor whole = model->forward(tokens);
  models::DecoderState state;
  std::int64_t at = 0;
  for (const std::int64_t count : {7, 1, 5, 1, 6}) {
    const at::Tensor logits = model->next(tokens.narrow(1, at, count), state);
    at += count;
    EXPECT_TRUE(at::allclose(logits, whole.select(1, at - 1), 1e-4, 1e-5)) << at;
  }
  EXPECT_THROW((void)model->next(tokens, state), c10::Error);  // 40 tokens, of at most 32
  EXPECT_THROW((void)model->generate(tokens, 13, {}), std::invalid_argument);
  EXPECT_THROW((void)model->generate(tokens, 3, {.top_p = 0}), std::invalid_argument);
}

TEST(LayersTest, GenerationLeavesTheModeOfEveryModule) {
  models::Llama model(small_llama());
  const auto modes = [&] {
    std::vector<bool> all;
    for (const auto& module : model->modules()) all.push_back(module->is_training());
    return all;
  };
  for (const bool training : {true, false}) {
    model->train(training);
    const auto parts = model->modules(/*include_self=*/false);
    parts[parts.size() / 2]->train(!training);
    const auto before = modes();
    (void)model->generate(torch::zeros({1, 2}, torch::kLong), 2, {});
    EXPECT_EQ(modes(), before);
  }
}

// Of the top_k most likely tokens, the fewest that have at least top_p of their probability.
std::vector<double> probabilities(const std::vector<double>& logits, const models::Sampling& sampling) {
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0U);
  std::sort(order.begin(), order.end(), [&](auto a, auto b) { return logits[a] > logits[b]; });
  if (sampling.top_k > 0) order.resize(static_cast<std::size_t>(sampling.top_k));
  double all = 0, kept = 0;
  for (const auto token : order) all += std::exp(logits[token] / sampling.temperature);
  std::vector<double> likely(logits.size(), 0);
  for (const auto token : order) {
    if (kept >= sampling.top_p * all) break;
    likely[token] = std::exp(logits[token] / sampling.temperature);
    kept += likely[token];
  }
  for (double& value : likely) value /= kept;
  return likely;
}

// Pearson's chi-square test with 1 % of one percent, its quantile by Wilson and Hilferty's formula.
TEST(LayersTest, TokensAreDrawnAsOftenAsTheyAreLikely) {
  const std::vector<double> logits = {0.3, -1.2, 1.9, 0.8, -0.1, 2.4, 1.1, -0.7, 0.6, 1.5, -2.0, 0.0};
  const at::Tensor row = torch::tensor(logits).to(torch::kFloat32).unsqueeze(0);
  torch::nn::Module model;
  const std::int64_t rows = 4000, steps = 10;
  for (const models::Sampling& sampling : {models::Sampling{},
                                           {.temperature = 0.6},
                                           {.temperature = 1.7},
                                           {.top_k = 5},
                                           {.temperature = 0.8, .top_p = 0.7},
                                           {.top_p = 0.35},
                                           {.temperature = 1.3, .top_k = 8, .top_p = 0.8},
                                           {.temperature = 0.5, .top_k = 3}}) {
    const at::Tensor drawn = models::generate_by(
        model,
        [&](const at::Tensor& newest) {
          return row.expand({newest.size(0), row.size(1)});
        },
        torch::zeros({rows, 1}, torch::kLong), steps, sampling);
    const at::Tensor counts = torch::bincount(drawn.narrow(1, 1, steps).flatten(), {}, row.size(1));
    const auto likely = probabilities(logits, sampling);
    double square = 0, kinds = 0;
    for (std::size_t i = 0; i < likely.size(); ++i) {
      const double count = counts[static_cast<std::int64_t>(i)].item<double>(), wanted = likely[i] * rows * steps;
      if (likely[i] == 0) {
        EXPECT_EQ(count, 0) << i << " with top_k " << sampling.top_k << ", top_p " << sampling.top_p;
        continue;
      }
      square += (count - wanted) * (count - wanted) / wanted;
      ++kinds;
    }
    const double freedom = kinds - 1, part = 2 / (9 * freedom);
    EXPECT_LT(square, freedom * std::pow(1 - part + 3.719 * std::sqrt(part), 3))
        << "temperature " << sampling.temperature << ", top_k " << sampling.top_k << ", top_p " << sampling.top_p;
  }
}

TEST(LayersTest, WrongShapesAreRefused) {
  const at::Tensor x = torch::ones({2, 3, 5, 8}), half = torch::ones({5, 8});
  EXPECT_NO_THROW((void)models::rotate_halves(x, half, half));
  for (const at::Tensor& bad : {torch::ones({4, 8}), torch::ones({5, 4}), torch::ones({3, 5, 8}), torch::ones({8})}) {
    EXPECT_THROW((void)models::rotate_halves(x, bad, bad), c10::Error) << bad.sizes();
    EXPECT_THROW((void)models::rotate_halves(x, half, bad), c10::Error) << bad.sizes();
  }
  EXPECT_THROW((void)models::gated_silu(x, half), c10::Error);
  models::T5Config config;
  config.encoder_layers = config.decoder_layers = 1, config.hidden = 8, config.heads = 2, config.head_width = 4;
  config.inner = 8, config.vocabulary = 10;
  models::T5ForConditionalGeneration t5(config);
  const at::Tensor tokens = torch::zeros({1, 4}, torch::kLong);
  EXPECT_THROW((void)t5->forward(tokens, tokens, torch::ones({1, 4, 4})), c10::Error);
  EXPECT_NO_THROW((void)t5->forward(tokens, tokens, torch::ones({1, 4})));
}

TEST(LayersTest, MasksHideAndStayFinite) {
  torch::manual_seed(5);
  models::Llama model(small_llama());
  const at::Tensor tokens = torch::randint(50, {2, 10}, torch::kLong);
  // Packed samples: the second one does not see the first.
  const at::Tensor sample = torch::tensor({0, 0, 0, 0, 1, 1, 1, 1, 1, 1});
  const at::Tensor packed = sample.unsqueeze(0).eq(sample.unsqueeze(1)).expand({2, 10, 10});
  const at::Tensor logits = model->forward(tokens, packed);
  EXPECT_TRUE(at::allclose(logits.narrow(1, 4, 6), model->forward(tokens.narrow(1, 4, 6)), 1e-4, 1e-5));
  // A row that is padding alone, in a batch that is trained.
  const at::Tensor mask = torch::tensor({{1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0}});
  const at::Tensor targets = tokens.masked_fill(mask.logical_not(), models::kIgnored);
  model->loss(tokens, targets, mask).backward();
  for (const at::Tensor& p : model->parameters()) EXPECT_TRUE(p.grad().isfinite().all().item<bool>());
  // Not every kernel of libtorch bears a row without any key.
  for (const bool causal : {true, false}) {
    const at::Tensor added = models::visible(mask, 10, 10, causal, torch::empty({0})).added;
    EXPECT_FALSE(added.isinf().all(-1).any().item<bool>());
  }
  EXPECT_THROW((void)model->forward(tokens, torch::ones({2, 9})), c10::Error);
  EXPECT_THROW((void)model->forward(tokens.to(torch::kFloat32)), c10::Error);
  EXPECT_THROW((void)model->forward(torch::zeros({1, 33}, torch::kLong)), c10::Error);
}

}  // namespace
}  // namespace layers_test
