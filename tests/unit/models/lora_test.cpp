// Low-rank factors in a model: names, first values, what is trained, and merged weights, against the formula in plain
// products.
#include "models/lora.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "models/adaptable.h"
#include "models/layers.h"
#include "models/llama.h"

namespace models {
namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", AdaptableLinear(6, 4));
    second = register_module("second", AdaptableLinear(4, 3));
    plain = register_module("plain", torch::nn::Linear(3, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return plain(second(torch::tanh(first(x)))); }
  AdaptableLinear first{nullptr}, second{nullptr};
  torch::nn::Linear plain{nullptr};
};
TORCH_MODULE(Net);

bool is_first(const std::string& path) { return path == "first"; }

at::Tensor parameter(torch::nn::Module& model, const std::string& name) { return model.named_parameters()[name]; }

TEST(Lora, BeginsAsTheModelWasAndTrainsTheFactors) {
  torch::manual_seed(1);
  Net net;
  const at::Tensor x = torch::randn({50, 6}), before = net(x);
  const Lora lora(*net, {.rank = 2, .alpha = 6}, is_first,
                  [](const std::string& name) { return name == "plain.bias"; });
  EXPECT_TRUE(net(x).equal(before));
  EXPECT_EQ(lora.layers(), std::vector<std::string>{"first"});
  const std::vector<std::string> factors = {"first.lora_A.weight", "first.lora_B.weight"};
  EXPECT_EQ(lora.parameters(), factors);
  std::vector<std::string> trained;
  for (const auto& item : net->named_parameters())
    if (item.value().requires_grad()) trained.push_back(item.key());
  std::sort(trained.begin(), trained.end());
  EXPECT_EQ(trained, (std::vector<std::string>{factors[0], factors[1], "plain.bias"}));
  const at::Tensor a = parameter(*net, factors[0]), b = parameter(*net, factors[1]);
  EXPECT_EQ(a.sizes(), (std::vector<std::int64_t>{2, 6}));
  EXPECT_EQ(b.sizes(), (std::vector<std::int64_t>{4, 2}));
  EXPECT_LE(a.abs().max().item<double>(), 1 / std::sqrt(6.0));
  EXPECT_GT(a.abs().max().item<double>(), 0.5 / std::sqrt(6.0));
  EXPECT_EQ(b.abs().max().item<double>(), 0);
  EXPECT_TRUE(Lora::is_factor(factors[0]));
  EXPECT_FALSE(Lora::is_factor("first.weight"));
}

TEST(Lora, AddsTheProductOfItsFactors) {
  torch::manual_seed(2);
  Net net;
  Lora lora(*net, {.rank = 2, .alpha = 6}, is_first);
  const torch::NoGradGuard no_grad;
  const at::Tensor a = parameter(*net, "first.lora_A.weight"), b = parameter(*net, "first.lora_B.weight");
  b.normal_();
  const at::Tensor x = torch::randn({5, 6}), weight = parameter(*net, "first.weight").clone();
  const at::Tensor whole = weight + 3.0 * b.matmul(a);  // alpha / rank = 3
  const at::Tensor hidden = torch::tanh(torch::linear(x, whole, parameter(*net, "first.bias")));
  const at::Tensor wanted = net->plain(net->second(hidden)), got = net(x);
  EXPECT_LT((got - wanted).abs().max().item<double>(), 1e-5);
  lora.merge("first");
  EXPECT_LT((parameter(*net, "first.weight") - whole).abs().max().item<double>(), 1e-6);
  EXPECT_LT((net(x) - got).abs().max().item<double>(), 1e-5) << "the factors no longer count";
}

// Ranks merge the elements that they hold, in windows: any range gives the bits of the whole.
TEST(Lora, AnyRangeOfTheChangeHasTheSameBits) {
  torch::manual_seed(4);
  const std::int64_t rank = 5, in = 37, out = 11;
  const at::Tensor a = torch::randn({rank, in}), b = torch::randn({out, rank}), weight = torch::randn({out, in});
  const auto merged = [&](const std::vector<std::int64_t>& bounds) {
    at::Tensor sum = weight.clone();
    for (std::size_t i = 0; i + 1 < bounds.size(); ++i)
      Lora::add_change(
          a, b, 1.7, bounds[i],
          {sum.mutable_data_ptr<float>() + bounds[i], static_cast<std::size_t>(bounds[i + 1] - bounds[i])});
    return sum;
  };
  const at::Tensor whole = merged({0, out * in});
  const at::Tensor wanted = weight.to(torch::kDouble) + 1.7 * b.to(torch::kDouble).matmul(a.to(torch::kDouble));
  EXPECT_LT((whole - wanted).abs().max().item<double>(), 1e-5);
  EXPECT_TRUE(whole.equal(merged({0, 1, 36, 37, 38, 100, 111, 400, out * in})));
}

TEST(Lora, DropsTheFactorsInputInTrainingAlone) {
  torch::manual_seed(3);
  Net net;
  const Lora lora(*net, {.rank = 2, .alpha = 2, .dropout = 0.5}, is_first);
  {
    const torch::NoGradGuard no_grad;
    parameter(*net, "first.lora_B.weight").normal_();
  }
  const at::Tensor x = torch::randn({5, 6});
  EXPECT_FALSE(net(x).equal(net(x)));
  net->eval();
  EXPECT_TRUE(net(x).equal(net(x)));
}

// Its output has the weight of its embedding.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(5, 3));
    hidden = register_module("hidden", AdaptableLinear(3, 3));
    output = register_module("output", Linear(embedding->weight, at::Tensor()));
  }
  torch::nn::Embedding embedding{nullptr};
  AdaptableLinear hidden{nullptr};
  Linear output{nullptr};
};
TORCH_MODULE(Tied);

TEST(Lora, RefusesTiedWeights) {
  const auto error = [](torch::nn::Module& model, const std::string& target) -> std::string {
    try {
      Lora(model, {.rank = 1}, [&](const std::string& path) { return path == target; });
    } catch (const std::invalid_argument& e) {
      return e.what();
    }
    return "";
  };
  Tied net;
  EXPECT_EQ(error(*net, "output").find("[Lora] got the target output, whose weight is also embedding.weight, expected"),
            0u)
      << error(*net, "output");
  for (const auto& item : net->named_parameters()) EXPECT_TRUE(item.value().requires_grad()) << item.key();
  EXPECT_EQ(error(*net, "hidden"), "");
  // As the models themselves tie.
  LlamaConfig config;
  config.vocabulary = 11, config.hidden = 8, config.layers = 1, config.heads = config.kv_heads = 2, config.inner = 8;
  config.tied_output = true;
  Llama llama(config);
  EXPECT_NE(error(*llama, "lm_head").find("model.embed_tokens.weight"), std::string::npos);
}

TEST(Lora, RefusesWhatIsNoAdapter) {
  Net net;
  EXPECT_THROW(Lora(*net, {.rank = 0}, is_first), std::invalid_argument);
  EXPECT_THROW(Lora(*net, {.rank = 1, .dropout = 1}, is_first), std::invalid_argument);
  EXPECT_THROW(Lora(*net, {}, [](const std::string& path) { return path == "plain"; }), std::invalid_argument)
      << "a layer that cannot be adapted";
}

}  // namespace
}  // namespace models
