// The gate of a mixture of experts, against numbers computed by hand, a plain loop, and DeepSpeed's choices.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "parallel/dispatch.h"
#include "parallel/gate.h"
#include "support/nightly.h"

namespace zero::parallel {
namespace {

using Numbers = std::vector<std::int64_t>;

// Eight tokens, four experts.
at::Tensor example() {
  return at::tensor({.55F, .25F, .15F, .05F, .45F, .12F, .35F, .08F, .50F, .30F, .05F, .15F, .20F, .60F, .14F, .06F,
                     .40F, .28F, .22F, .10F, .10F, .15F, .70F, .05F, .35F, .05F, .20F, .40F, .15F, .55F, .20F, .10F})
      .view({8, 4});
}

GateOptions options_of(std::int64_t k, double factor, std::int64_t minimum = 0) {
  return {.experts = 4,
          .k = k,
          .capacity_factor = factor,
          .min_capacity = minimum,
          .random_selection = false,
          .second_sampling = false};
}

Routing route_example(const GateOptions& options) { return route(example().log(), example(), options, {}); }

// "t0 0:0:0.55", one entry for each kept choice: token, expert, slot, weight.
std::string text_of(const Routing& routing, const at::Tensor& gates, const GateOptions& options) {
  const auto weights = choice_weights(gates, routing, options);
  Numbers start(routing.kept.size());
  for (std::size_t e = 1; e < start.size(); ++e) start[e] = start[e - 1] + routing.kept[e - 1];
  std::string text;
  for (std::int64_t s = 0; s < gates.size(0); ++s) {
    std::string of_token;
    for (std::int64_t c = 0; c < options.k; ++c) {
      const auto place = routing.place[s][c].item<std::int64_t>();
      if (place < 0) {
        EXPECT_EQ(weights[s][c].item<float>(), 0) << "token " << s;
        continue;
      }
      const auto expert = routing.expert[s][c].item<std::int64_t>();
      char entry[64];
      std::snprintf(entry, sizeof entry, " %ld:%ld:%.6g", expert, place - start[static_cast<std::size_t>(expert)],
                    static_cast<double>(weights[s][c].item<float>()));
      of_token += entry;
    }
    if (!of_token.empty()) text += "t" + std::to_string(s) + of_token + "; ";
  }
  return text;
}

std::string text_of(const GateOptions& options) { return text_of(route_example(options), example(), options); }

double loss_of(const GateOptions& options) {
  return auxiliary_loss(example(), route_example(options), options).item<double>();
}

// --- by hand ------------------------------------------------------------------------------------

TEST(Gate, Capacities) {
  EXPECT_EQ(capacity(16, 4, 1.25, 1, 4), 5);
  EXPECT_EQ(capacity(10, 4, 1, 1, 4), 4);
  EXPECT_EQ(capacity(100, 4, 1.2, 1, 4), 30) << "1.2 in fp32 is a little more than 1.2";
  EXPECT_EQ(capacity(100, 4, 2.2, 1, 4), 55);
  EXPECT_EQ(capacity(8, 4, 1.5, 1, 0), 3);
  EXPECT_EQ(capacity(8, 4, 1.5, 1, 4), 4);
  EXPECT_EQ(capacity(8, 4, .5, 3, 0), 3);
  EXPECT_EQ(capacity(0, 4, 1, 1, 4), 4);
  EXPECT_EQ(capacity(1, 64, 1e-9, 1, 0), 1);
  EXPECT_GE(capacity(std::int64_t{1} << 40, 1, 1e9, 8, 0), std::int64_t{1} << 40);
}

TEST(Gate, OneExpertFirstComeFirstServed) {
  const auto options = options_of(1, 1);
  EXPECT_EQ(text_of(options), "t0 0:0:0.55; t1 0:1:0.45; t3 1:0:0.6; t5 2:0:0.7; t6 3:0:0.4; t7 1:1:0.55; ");
  EXPECT_EQ(route_example(options).chosen, (Numbers{4, 2, 1, 1}));
  EXPECT_EQ(route_example(options).kept, (Numbers{2, 2, 1, 1}));
  EXPECT_NEAR(loss_of(options), 1.15, 1e-6);
}

TEST(Gate, NothingIsDroppedWhenAsked) {
  auto options = options_of(1, 1);
  options.drop_tokens = false;
  EXPECT_EQ(text_of(options),
            "t0 0:0:0.55; t1 0:1:0.45; t2 0:2:0.5; t3 1:0:0.6; t4 0:3:0.4; t5 2:0:0.7; t6 3:0:0.4; t7 1:1:0.55; ");
  EXPECT_NEAR(loss_of(options), 1.15, 1e-6);
}

TEST(Gate, TwoExperts) {
  const auto options = options_of(2, 1);
  EXPECT_EQ(text_of(options),
            "t0 0:0:0.6875 1:2:0.3125; t1 0:1:0.5625 2:1:0.4375; t2 0:2:0.625 1:3:0.375; t3 1:0:1; t4 0:3:1; t5 2:0:1; "
            "t6 3:0:1; t7 1:1:0.733333 2:2:0.266667; ");
  EXPECT_EQ(route_example(options).chosen, (Numbers{6, 6, 3, 1}));
  EXPECT_EQ(route_example(options).balanced, (Numbers{4, 2, 1, 1}));
  EXPECT_NEAR(loss_of(options), 1.15, 1e-6);
}

TEST(Gate, TwoExpertsOfHalfTheCapacity) {
  EXPECT_EQ(text_of(options_of(2, .5)), "t0 0:0:1; t1 0:1:0.5625 2:1:0.4375; t3 1:0:1; t5 2:0:1; t6 3:0:1; t7 1:1:1; ");
}

// Slots count tokens of an expert, in order.
TEST(Gate, ThreeExpertsKeepTheirLikeliest) {
  const auto options = options_of(3, .5);
  EXPECT_EQ(text_of(options),
            "t0 0:0:1; t1 0:1:0.5625 2:0:0.4375; t2 0:2:0.526316 1:0:0.315789 3:0:0.157895; t3 1:1:1; t4 2:1:1; "
            "t5 2:2:1; t6 3:1:1; t7 1:2:1; ");
  EXPECT_EQ(route_example(options).chosen, (Numbers{8, 7, 7, 2}));
  EXPECT_NEAR(loss_of(options), 215. / 192, 1e-6);
}

TEST(Gate, ThreeExpertsKeepTheirFirst) {
  auto options = options_of(3, .5);
  options.keep_likeliest = false;
  EXPECT_EQ(text_of(options),
            "t0 0:0:0.578947 1:0:0.263158 2:0:0.157895; t1 0:1:0.48913 2:1:0.380435 1:1:0.130435; t2 0:2:0.526316 "
            "1:2:0.315789 3:0:0.157895; t3 2:2:1; t6 3:1:1; ");
  EXPECT_NEAR(loss_of(options), 215. / 192, 1e-6);
}

TEST(Gate, TiesGoToTheLowestExpertAndToken) {
  for (const std::int64_t k : {1, 2, 3}) {
    const auto options = options_of(k, 1);
    const auto gates = at::full({8, 4}, .25F);
    const auto routing = route(gates.log(), gates, options, {});
    for (std::int64_t s = 0; s < 8; ++s)
      for (std::int64_t c = 0; c < k; ++c)
        EXPECT_EQ(routing.place[s][c].item<std::int64_t>(), s < 2 * k ? c * 2 * k + s : -1) << s << " " << c;
  }
}

TEST(Gate, UnusedTokensTakeNoPart) {
  auto options = options_of(1, 1);
  const auto used = at::tensor({1, 0, 1, 1, 1, 0, 1, 1});
  const auto routing = route(example().log(), example(), options, used);
  EXPECT_EQ(text_of(routing, example(), options), "t0 0:0:0.55; t2 0:1:0.5; t3 1:0:0.6; t6 3:0:0.4; t7 1:1:0.55; ");
  EXPECT_EQ(routing.chosen, (Numbers{3, 2, 0, 1}));
  const auto mean = example().mean(0);
  EXPECT_NEAR(auxiliary_loss(example(), routing, options).item<double>(),
              4 * (mean[0] * 3 / 8 + mean[1] * 2 / 8 + mean[3] / 8).item<double>(), 1e-6);
}

TEST(Gate, NoTokens) {
  for (const std::int64_t k : {1, 2, 3}) {
    auto gates = at::empty({0, 4}).requires_grad_();
    const auto options = options_of(k, 1);
    const auto routing = route(gates.detach(), gates.detach(), options, {});
    EXPECT_EQ(routing.rows(), 0);
    EXPECT_EQ(routing.kept, (Numbers{0, 0, 0, 0}));
    const auto loss = auxiliary_loss(gates, routing, options);
    EXPECT_EQ(loss.item<float>(), 0);
    loss.backward();
    EXPECT_TRUE(gates.grad().defined());
    EXPECT_EQ(choice_weights(gates, routing, options).sizes(), (at::IntArrayRef{0, k}));
  }
}

// --- random cases against a plain loop ----------------------------------------------------------

struct Kept {
  std::int64_t token, choice, expert;
  auto operator<=>(const Kept&) const = default;
};

// Written from the rules: choices by sorting all experts, capacities by counting.
std::vector<Kept> plain(const at::Tensor& gates, const GateOptions& options) {
  const auto n = gates.size(0), experts = gates.size(1);
  const auto g = gates.accessor<float, 2>();
  std::vector<Kept> all;
  for (std::int64_t s = 0; s < n; ++s) {
    Numbers order;
    for (std::int64_t e = 0; e < experts; ++e) order.push_back(e);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return g[s][a] > g[s][b]; });
    for (std::int64_t c = 0; c < options.k; ++c) all.push_back({s, c, order[static_cast<std::size_t>(c)]});
  }
  const auto most =
      options.drop_tokens
          ? std::max<std::int64_t>(
                static_cast<std::int64_t>(std::ceil(static_cast<double>(n) / static_cast<double>(experts) *
                                                    options.capacity_factor * static_cast<double>(options.k))),
                options.min_capacity)
          : n * options.k;
  std::vector<Kept> kept;
  for (std::int64_t e = 0; e < experts; ++e) {
    std::vector<Kept> of_expert;
    for (const auto& choice : all)
      if (choice.expert == e) of_expert.push_back(choice);
    if (options.k == 2)  // first choices before second ones
      std::stable_sort(of_expert.begin(), of_expert.end(), [](auto& a, auto& b) { return a.choice < b.choice; });
    if (options.k > 2 && options.keep_likeliest)
      std::stable_sort(of_expert.begin(), of_expert.end(),
                       [&](auto& a, auto& b) { return g[a.token][e] > g[b.token][e]; });
    if (static_cast<std::int64_t>(of_expert.size()) > most) of_expert.resize(static_cast<std::size_t>(most));
    if (options.k > 2)
      std::sort(of_expert.begin(), of_expert.end(), [](auto& a, auto& b) { return a.token < b.token; });
    kept.insert(kept.end(), of_expert.begin(), of_expert.end());
  }
  return kept;
}

TEST(Gate, TenThousandRandomCases) {
  std::mt19937_64 random(7);
  const auto any = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  torch::manual_seed(11);
  for (int i = 0; i < (zero::test::nightly() ? 10000 : 1000); ++i) {
    GateOptions options{.experts = any(1, 9)};
    options.k = any(1, std::min<std::int64_t>(options.experts, 4));
    options.capacity_factor = static_cast<double>(any(1, 16)) / 8;  // exact in binary
    options.min_capacity = any(0, 3);
    options.drop_tokens = any(0, 4) != 0;
    options.keep_likeliest = any(0, 1) != 0;
    options.training = false;
    const auto n = any(0, 24);
    // Few different logits, so that ties occur.
    const auto logits = at::randint(0, any(2, 50), {n, options.experts}).to(at::kFloat) / 4;
    const auto gates = logits.softmax(1);
    const auto routing = route(logits, gates, options, {});
    const auto expected = plain(gates, options);
    ASSERT_EQ(routing.rows(), static_cast<std::int64_t>(expected.size())) << "case " << i;
    for (std::size_t r = 0; r < expected.size(); ++r) {
      const auto choice = routing.choice_of_row[static_cast<std::int64_t>(r)].item<std::int64_t>();
      const Kept got{choice / options.k, choice % options.k, routing.expert.view({-1})[choice].item<std::int64_t>()};
      ASSERT_TRUE(got == expected[r]) << "case " << i << ", row " << r;
      ASSERT_EQ(routing.place.view({-1})[choice].item<std::int64_t>(), static_cast<std::int64_t>(r));
    }
    ASSERT_EQ(routing.place.ge(0).sum().item<std::int64_t>(), routing.rows());
  }
}

// --- random selection ---------------------------------------------------------------------------

// DeepSpeed's choice with the same numbers: the largest of a uniform draw for each token and expert.
TEST(Gate, RandomSelectionKeepsTheLargestDraws) {
  auto options = options_of(1, 1);
  options.random_selection = true;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    torch::manual_seed(seed);
    const auto routing = route_example(options);
    torch::manual_seed(seed);
    const auto draws = at::rand({8, 4});
    std::vector<std::pair<float, std::int64_t>> of_first;
    for (const std::int64_t s : {0, 1, 2, 4}) of_first.emplace_back(-draws[s][0].item<float>(), s);
    std::sort(of_first.begin(), of_first.end());
    Numbers expected{of_first[0].second, of_first[1].second};
    std::sort(expected.begin(), expected.end());
    EXPECT_EQ((Numbers{routing.choice_of_row[0].item<std::int64_t>(), routing.choice_of_row[1].item<std::int64_t>()}),
              expected);
  }
}

TEST(Gate, EvaluationDrawsNothing) {
  for (const std::int64_t k : {1, 2}) {
    auto options = options_of(k, 1);
    options.random_selection = options.second_sampling = true;
    options.noisy_logits = k == 1;
    options.training = false;
    torch::manual_seed(3);
    const auto text = text_of(options);
    const auto next = at::rand({1}).item<float>();
    torch::manual_seed(3);
    EXPECT_EQ(next, at::rand({1}).item<float>());
    options.random_selection = options.second_sampling = options.noisy_logits = false;
    EXPECT_EQ(text, text_of(options));
  }
}

// Shares of dropped tokens of uniformly random choices, in percent, from the binomial distribution.
TEST(Gate, DropsAsManyAsChanceWould) {
  torch::manual_seed(5);
  for (const auto& [tokens, experts, factor, share] :
       {std::tuple{4096, 8, 1.0, 1.65}, {1024, 8, 1.0, 3.30}, {4096, 64, 1.0, 4.94}, {4096, 64, 1.25, 0.13}}) {
    GateOptions options{.experts = experts, .capacity_factor = factor, .min_capacity = 0, .training = false};
    std::int64_t kept = 0;
    constexpr int kRounds = 300;
    for (int round = 0; round < kRounds; ++round) {
      const auto gates = at::rand({tokens, experts}).softmax(1);
      kept += route(gates.log(), gates, options, {}).rows();
    }
    EXPECT_NEAR(100 * (1 - static_cast<double>(kept) / (kRounds * tokens)), share, 0.2) << tokens << " " << experts;
  }
}

// --- gradients and rows -------------------------------------------------------------------------

// Of weights and loss, by finite differences of the formulas in fp64.
TEST(Gate, GradientsOfWeightsAndLoss) {
  for (const std::int64_t k : {1, 2, 3}) {
    auto options = options_of(k, .5);
    const auto routing = route_example(options);
    torch::manual_seed(1);
    const auto factors = at::randn({8, k}, at::kDouble);
    const auto value = [&](const at::Tensor& gates) {
      return (choice_weights(gates, routing, options) * factors).sum() + auxiliary_loss(gates, routing, options);
    };
    auto gates = example().to(at::kDouble).requires_grad_();
    value(gates).backward();
    for (std::int64_t i = 0; i < 32; ++i) {
      const double h = 1e-6;
      auto up = example().to(at::kDouble), down = up.clone();
      up.view({-1})[i] += h;
      down.view({-1})[i] -= h;
      const auto slope = ((value(up) - value(down)) / (2 * h)).item<double>();
      EXPECT_NEAR(gates.grad().view({-1})[i].item<double>(), slope, 1e-7) << k << " " << i;
    }
  }
}

TEST(Dispatch, SumsAndGradientsAreThoseOfADenseProduct) {
  torch::manual_seed(2);
  for (const std::int64_t k : {1, 2, 3})
    for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
      const auto options = options_of(k, .5);
      const auto routing = route_example(options);
      const auto weights = choice_weights(example(), routing, options);
      const std::int64_t width = 37;
      auto x = at::randn({8, width}).to(dtype).requires_grad_();
      auto w = weights.clone().requires_grad_();
      const auto rows = dispatch(x, routing);
      ASSERT_EQ(rows.sizes(), (at::IntArrayRef{routing.rows(), width}));
      const auto y = combine(rows * 2, w, routing);
      const auto factors = at::randn({8, width}).to(dtype);
      y.backward(factors);
      // A token's rows are copies of it, so y = 2 * x * (the sum of its kept weights).
      auto x2 = x.detach().to(at::kDouble).requires_grad_();
      auto w2 = weights.to(at::kDouble).requires_grad_();
      const auto kept = routing.place.ge(0).to(at::kDouble);
      const auto expected = 2 * x2 * (w2 * kept).sum(1, true);
      expected.backward(factors.to(at::kDouble));
      const double tolerance = dtype == at::kDouble  ? 1e-7
                               : dtype == at::kFloat ? 1e-5
                               : dtype == at::kHalf  ? 1e-2
                                                     : 6e-2;
      const auto close = [&](const at::Tensor& a, const at::Tensor& b) {
        return at::allclose(a.to(at::kDouble), b, tolerance, tolerance);
      };
      EXPECT_TRUE(close(y, expected)) << k << " " << dtype;
      EXPECT_TRUE(close(x.grad(), x2.grad())) << k << " " << dtype;
      EXPECT_TRUE(at::allclose(w.grad().to(at::kDouble), w2.grad(), tolerance, 6 * tolerance)) << k << " " << dtype;
    }
}

// A dropped token has no row, also where the values of others are not finite.
TEST(Dispatch, DroppedTokensStayZero) {
  const auto options = options_of(1, 1);
  const auto routing = route_example(options);
  const auto rows = at::full({routing.rows(), 3}, std::numeric_limits<float>::infinity());
  const auto y = combine(rows, choice_weights(example(), routing, options), routing);
  for (const std::int64_t s : {2, 4}) EXPECT_TRUE(y[s].eq(0).all().item<bool>()) << y[s];
  EXPECT_TRUE(y[0].isinf().all().item<bool>());
}

TEST(Dispatch, BitsDoNotDependOnThreads) {
  const auto gates = at::rand({3000, 16}).softmax(1);
  GateOptions options{.experts = 16, .k = 3, .training = false};
  const auto routing = route(gates.log(), gates, options, {});
  const auto x = at::randn({3000, 64}).to(at::kBFloat16);
  const auto weights = choice_weights(gates, routing, options);
  const int before = at::get_num_threads();
  std::vector<at::Tensor> results;
  for (const int threads : {1, 4}) {
    at::set_num_threads(threads);
    auto in = x.clone().requires_grad_();
    auto w = weights.clone().requires_grad_();
    const auto y = combine(dispatch(in, routing), w, routing);
    y.backward(x);
    results.push_back(at::cat({y.to(at::kFloat).view({-1}), in.grad().to(at::kFloat).view({-1}), w.grad().view({-1})}));
  }
  at::set_num_threads(before);
  EXPECT_TRUE(results[0].equal(results[1]));
}

}  // namespace
}  // namespace zero::parallel
