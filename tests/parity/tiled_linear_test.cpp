// zero::TiledLinear is a Linear in values and gradients, and stage 3 holds one tile of it where it held the layer.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/library.h>
#include <zero/tiled_linear.h>

#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace zero::test::tiled_linear_test {
namespace {

using Tier = MemoryReport::Tier;
using Purpose = MemoryReport::Purpose;

// The largest distance, in parts of the largest value.
double distance(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).abs().max() / b.abs().max()).item<double>();
}

struct Splits {
  std::int64_t in, out;
};

// The values of the tiles put together, or their gradients, as of a Linear: [out, in] and [out].
struct Whole {
  at::Tensor weight, bias;
};
Whole assembled(TiledLinearImpl& layer, const std::function<at::Tensor(const std::string&)>& value) {
  std::vector<at::Tensor> rows, biases;
  for (std::int64_t r = 0; r < layer.options.out_splits; ++r) {
    std::vector<at::Tensor> row;
    const auto path = "linears." + std::to_string(r) + ".";
    for (std::int64_t c = 0; c < layer.options.in_splits; ++c)
      row.push_back(value(path + std::to_string(c) + ".weight"));
    rows.push_back(at::cat(row, 1));
    biases.push_back(value(path + std::to_string(layer.options.in_splits - 1) + ".bias"));
  }
  return {at::cat(rows, 0), at::cat(biases, 0)};
}

TEST(TiledLinear, EqualsALinearInOutputAndGradients) {
  torch::manual_seed(3);
  torch::nn::Linear whole(60, 44);
  const auto x = at::randn({2, 5, 60}), weights = at::randn({2, 5, 44});
  const auto input = x.clone().requires_grad_();
  const auto y = whole->forward(input);
  (y * weights).sum().backward();
  for (const auto splits : {Splits{1, 1}, Splits{3, 2}, Splits{7, 5}, Splits{60, 44}}) {  // 7 and 5 are uneven
    TiledLinear tiled(TiledLinearOptions{60, 44, true, splits.in, splits.out});
    tiled->copy_params_from(whole);
    EXPECT_EQ(tiled->parameters().size(), static_cast<std::size_t>(splits.in * splits.out + splits.out));
    const auto own = x.clone().requires_grad_();
    const auto out = tiled->forward(own);
    (out * weights).sum().backward();
    EXPECT_LT(distance(out, y), 1e-6);
    EXPECT_LT(distance(own.grad(), input.grad()), 1e-6);
    const auto named = tiled->named_parameters();
    const auto gradients = assembled(*tiled, [&](const std::string& name) { return named[name].grad(); });
    EXPECT_LT(distance(gradients.weight, whole->weight.grad()), 1e-6);
    EXPECT_LT(distance(gradients.bias, whole->bias.grad()), 1e-6);
    const auto values = assembled(*tiled, [&](const std::string& name) { return named[name]; });
    EXPECT_TRUE(values.weight.equal(whole->weight) && values.bias.equal(whole->bias));
  }
}

TEST(TiledLinear, TakesAndReturnsParts) {
  torch::manual_seed(4);
  torch::nn::Linear whole(torch::nn::LinearOptions(10, 7).bias(false));
  TiledLinear tiled(TiledLinearOptions{10, 7, false, 3, 2});
  tiled->copy_params_from(whole);
  EXPECT_EQ(tiled->in_sizes, (std::vector<std::int64_t>{4, 3, 3}));
  EXPECT_EQ(tiled->out_sizes, (std::vector<std::int64_t>{4, 3}));
  const auto x = at::randn({2, 10});
  const auto parts = tiled->forward_parts(x.split_with_sizes({4, 3, 3}, 1));
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_LT(distance(at::cat(parts, 1), whole->forward(x)), 1e-6);
  EXPECT_THROW(tiled->forward_parts(x.split(5, 1)), ConfigError);
  // A clone has tiles of its own with the same values.
  const auto copy = std::dynamic_pointer_cast<TiledLinearImpl>(tiled->clone());
  EXPECT_TRUE(copy->forward(x).equal(tiled->forward(x)));
  EXPECT_FALSE(copy->parameters()[0].is_alias_of(tiled->parameters()[0]));
}

TEST(TiledLinear, InitialValuesAreDistributedAsTheWholeLayers) {
  torch::manual_seed(5);
  TiledLinear tiled(TiledLinearOptions{64, 64, true, 16, 4});
  const double bound = 1 / std::sqrt(64.);
  for (const auto& value : tiled->parameters()) EXPECT_LE(value.abs().max().item<double>(), bound);
  EXPECT_GT(tiled->parameters()[0].abs().max().item<double>(), 0.8 * bound);
}

TEST(TiledLinear, InvalidOptionsAreListed) {
  const auto error_of = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(error_of([] {
              TiledLinear(TiledLinearOptions{4, 3, true, 5, 0});
            }),
            "[TiledLinear] got invalid options:\n  in_splits: got 5, expected 1 to 4\n  out_splits: got 0, expected 1 "
            "to 3");
  EXPECT_NE(error_of([] { TiledLinear(TiledLinearOptions{0, 3}); }).find("in_features: got 0"), std::string::npos);
  TiledLinear tiled(TiledLinearOptions{4, 3, true, 2, 1});
  EXPECT_EQ(error_of([&] { tiled->copy_params_from(torch::nn::Linear(torch::nn::LinearOptions(4, 3).bias(false))); }),
            "[TiledLinear::copy_params_from] got 4 x 3 without bias, expected 4 x 3 with bias");
}

// Blocks in a list, of which each has one layer: the unit of a block is the layer, or each tile is one.
struct Model : torch::nn::Module {
  torch::nn::ModuleList blocks;
  Model(std::int64_t features, const Splits& splits) {
    blocks = register_module("blocks", torch::nn::ModuleList());
    // All draws of the layers come before those of tiles, so that every model has the same values.
    const torch::nn::Linear wholes[] = {torch::nn::Linear(features, features), torch::nn::Linear(features, features)};
    for (const auto& whole : wholes) {
      auto block = std::make_shared<torch::nn::Module>("Block");
      if (splits.in == 0) {
        block->register_module("layer", whole.ptr());
      } else {
        TiledLinear tiled(TiledLinearOptions{features, features, true, splits.in, splits.out});
        tiled->copy_params_from(whole);
        block->register_module("layer", tiled.ptr());
      }
      blocks->push_back(block);
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) {
      const auto layer = block->named_children()["layer"];
      auto* const tiled = layer->as<TiledLinearImpl>();
      x = at::tanh(tiled != nullptr ? tiled->forward(x) : layer->as<torch::nn::LinearImpl>()->forward(x));
    }
    return x;
  }
};

struct Peak {
  std::uint64_t gathered = 0, reduced = 0;
  std::vector<std::pair<std::string, std::int64_t>> units;
  std::vector<at::Tensor> gradients;  // of the first block, whole: weight, bias
};

Peak measure(std::int64_t features, const Splits& splits, bool prefetch, const std::string& more = "") {
  Peak peak;
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    static std::mutex seeding;  // threads share libtorch's generator
    std::shared_ptr<Model> model;
    at::Tensor x;
    {
      const std::lock_guard lock(seeding);
      torch::manual_seed(7);
      model = std::make_shared<Model>(features, splits);
      torch::manual_seed(8 + comm->rank());
      x = at::randn({4, features});
    }
    Engine engine(
        model,
        Options::from_json(R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": )"
                           R"({"lr": 0.001}}, "zero_optimization": {"stage": 3, )"
                           R"("overlap_comm": false, "stage3_prefetch_bucket_size": )" +
                           std::string(prefetch ? "100000000" : "0") + "}" + more + "}"),
        comm);
    for (int k = 0; k < 3; ++k) {
      engine.backward(model->forward(x).square().mean());
      if (k == 0) {
        const std::string path = "blocks.0.layer.";
        auto* const tiled = model->blocks[0]->named_children()["layer"]->as<TiledLinearImpl>();
        const auto value = [&](const std::string& name) { return engine.gradient(path + name); };
        const auto whole = tiled != nullptr ? assembled(*tiled, value) : Whole{value("weight"), value("bias")};
        if (comm->rank() == 0) peak.gradients = {whole.weight, whole.bias};
        engine.reset_peak_memory();
      }
      engine.step();
    }
    if (comm->rank() != 0) return;
    peak.gathered = engine.memory().peak(Tier::Device, Purpose::GatherBuffers);
    peak.reduced = engine.memory().peak(Tier::Device, Purpose::ReduceBuffers);
    peak.units = engine.units();
  });
  return peak;
}

// spec: y, dx and dW equal, the unsharded peak that of a tile.
TEST(TiledLinear, StageThreeHoldsOneTileAtATime) {
  constexpr std::int64_t kFeatures = 240;
  const auto whole = measure(kFeatures, {0, 0}, false);
  ASSERT_EQ(whole.units.size(), 2u);
  EXPECT_NEAR(static_cast<double>(whole.gathered), 4. * kFeatures * (kFeatures + 1), 4 * 32);  // padding
  for (const auto splits : {Splits{2, 2}, Splits{1, 4}, Splits{3, 5}, Splits{7, 1}}) {
    const auto tiled = measure(kFeatures, splits, false);
    const auto tiles = static_cast<double>(splits.in * splits.out);
    ASSERT_EQ(tiled.units.size(), static_cast<std::size_t>(2 * splits.in * splits.out));
    EXPECT_EQ(tiled.units[1].first.substr(0, 23), "blocks.0.layer.linears.");
    EXPECT_NEAR(static_cast<double>(tiled.gathered) * tiles / static_cast<double>(whole.gathered), 1, 0.05);
    EXPECT_NEAR(static_cast<double>(tiled.reduced) * tiles / static_cast<double>(whole.reduced), 1, 0.05);
    ASSERT_EQ(tiled.gradients.size(), 2u);
    for (int i = 0; i < 2; ++i) EXPECT_LT(distance(tiled.gradients[i], whole.gradients[i]), 1e-6);
  }
  // With prefetch one more.
  const auto ahead = measure(kFeatures, {2, 2}, true);
  EXPECT_NEAR(static_cast<double>(ahead.gathered) * 4 / static_cast<double>(whole.gathered), 2, 0.1);
}

TEST(TiledLinear, TilesAreUnitsWithNamedUnitsToo) {
  const auto tiled = measure(48, {2, 1}, false, R"(, "libzero": {"units": ["blocks.0", "blocks.1"]})");
  ASSERT_EQ(tiled.units.size(), 4u);
  EXPECT_EQ(tiled.units[3].first, "blocks.1.layer.linears.0.1");
}

}  // namespace
}  // namespace zero::test::tiled_linear_test
