// What a layer of experts is made of, and which options it refuses.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <zero/library.h>

#include <set>
#include <string>

#include "parity/mesh_problems.h"
#include "parity/moe_problems.h"
#include "support/golden_texts.h"
#include "support/require.h"

namespace zero::test::moe_layer_test {
namespace {

using namespace zero::test::moe;
using zero::test::mesh::expect_passed;
using Comm = std::shared_ptr<Communicator>;

// Layers in a row are an expert, with names as in torch.
TEST(MoeLayer, ExpertsOfLayersInARow) {
  namespace nn = torch::nn;
  expect_passed({"shm", 2}, [](const Comm& comm) {
    torch::manual_seed(5);
    auto options = options_of(1, 2);
    MoE whole(options, nn::Sequential(nn::Linear(kHidden, 20), nn::Tanh(), nn::Linear(20, kHidden)));
    options.ep_size = 2;
    options.use_residual = true;
    nn::Sequential named;
    named->push_back("up", nn::Linear(kHidden, 20));
    named->push_back("act", nn::Tanh());
    named->push_back("down", nn::Linear(20, kHidden));
    MoE divided(options, named);
    const auto from = whole->named_parameters();
    require(from.contains("experts.3.2.bias") && divided->named_parameters().contains("experts.3.down.bias") &&
                divided->named_parameters().contains("mlp.up.weight"),
            "names");
    require(from["experts.0.0.weight"].equal(from["experts.3.0.weight"]) &&
                !from["experts.0.0.weight"].is_alias_of(from["experts.3.0.weight"]),
            "copies");
    const at::NoGradGuard no_grad;
    const std::string layers[] = {"up", "act", "down"};
    for (const auto& item : divided->named_parameters()) {
      auto name = item.key();
      for (int i = 0; i < 3; ++i)
        if (const auto at = name.find("." + layers[i] + "."); at != std::string::npos)
          name.replace(at + 1, layers[i].size(), std::to_string(i));
      if (from.contains(name)) item.value().copy_(from[name]);
    }
    const auto dense = divided->named_children()["mlp"];  // the expert that every token uses
    Engine engine(divided.ptr(), engine_options(1), comm);
    const auto x = moe::input_of(0, comm->rank()).repeat({1, 2});
    const auto [expected, loss, counts] = whole->forward(x);
    const auto shares = at::linear(x, divided->named_parameters()["coefficient.weight"],
                                   divided->named_parameters()["coefficient.bias"])
                            .softmax(1);
    const auto y = std::get<0>(divided->forward(x));
    const auto of_dense =
        at::linear(at::linear(x, dense->named_parameters()["up.weight"], dense->named_parameters()["up.bias"]).tanh(),
                   dense->named_parameters()["down.weight"], dense->named_parameters()["down.bias"]);
    require(at::allclose(y, expected * shares.narrow(1, 0, 1) + of_dense * shares.narrow(1, 1, 1), 1e-5, 1e-6),
            "the output");
  });
  EXPECT_THROW(MoE(options_of(1, 1), nn::Sequential()), ConfigError);
}

// Layers that are made of one module share nothing with each other or with it.
TEST(MoeLayer, CopiesAreOfTheLayerAlone) {
  MoeOptions options;
  options.hidden_size = 4;
  options.num_experts = 2;
  options.use_residual = true;
  const torch::nn::Linear original(4, 4);
  const MoE first(options, torch::nn::AnyModule(original)), second(options, torch::nn::AnyModule(original));
  std::set<const void*> weights{original->weight.data_ptr()};
  for (const auto& layer : {first, second})
    for (const auto& parameter : layer->named_parameters())
      if (parameter.key().ends_with("0.weight") || parameter.key().ends_with("1.weight") ||
          parameter.key() == "mlp.weight") {
        EXPECT_TRUE(weights.insert(parameter.value().data_ptr()).second) << parameter.key();
        EXPECT_TRUE(parameter.value().equal(original->weight)) << parameter.key();
      }
  EXPECT_EQ(weights.size(), 7u);
}

TEST(MoeLayer, OptionsAreCheckedAtOnce) {
  MoeOptions options;
  options.num_experts = 4;
  options.ep_size = 3;
  options.k = 5;
  options.capacity_factor = 0;
  options.min_capacity = -1;
  options.noisy_gate_policy = "RSample";
  options.drop_policy = "any";
  std::string text;
  try {
    MoE layer(options, torch::nn::AnyModule(torch::nn::Linear(4, 4)));
  } catch (const ConfigError& e) {
    text = e.what();
  }
  EXPECT_NO_THROW(require_golden("experts: all options", text));
}

}  // namespace
}  // namespace zero::test::moe_layer_test
