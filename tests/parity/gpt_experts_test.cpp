// The built-in GPT with experts: one expert is the MLP, checkpointed segments change nothing, and counts are those of
// the choices.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <zero/activation_checkpoint.h>
#include <zero/errors.h>
#include <zero/moe.h>

#include <map>
#include <string>
#include <vector>

#include <zero/library.h>

#include "models/gpt.h"
#include "tools/support/gpt_experts.h"
#include "tools/support/gpt_mesh.h"

namespace zero::test::gpt_experts_test {
namespace {

models::GptConfig shape() { return {.layers = 4, .hidden = 24, .heads = 3, .sequence = 10, .vocabulary = 30}; }

config::ExpertSettings settings(std::int64_t experts) {
  config::ExpertSettings s;
  s.num_experts = experts;
  s.min_capacity = 0;
  s.use_rts = s.top2_2nd_expert_sampling = false;
  return s;
}

models::Gpt make(const config::ExpertSettings& experts) {
  torch::manual_seed(3);
  auto config = shape();
  cli::add_experts(config, experts);
  return models::Gpt(config);
}

at::Tensor tokens() {
  torch::manual_seed(4);
  return torch::randint(30, {3, 11}, torch::kLong);
}

at::Tensor loss_of(models::Gpt& model) { return model->forward(tokens().narrow(1, 0, 10), tokens().narrow(1, 1, 10)); }

std::map<std::string, at::Tensor> gradients_of(models::Gpt& model) {
  std::map<std::string, at::Tensor> all;
  for (const auto& item : model->named_parameters())
    if (item.value().grad().defined()) all[item.key()] = item.value().grad().clone();
  return all;
}

TEST(GptExperts, EverySecondBlockHasThem) {
  const auto model = make(settings(2));
  std::vector<std::string> names;
  for (const auto& item : model->named_parameters())
    if (item.key().starts_with("blocks.1.") || item.key().find("wg") != std::string::npos) names.push_back(item.key());
  EXPECT_EQ(names, (std::vector<std::string>{"blocks.1.norm1.weight", "blocks.1.norm1.bias", "blocks.1.qkv.weight",
                                             "blocks.1.qkv.bias", "blocks.1.projection.weight",
                                             "blocks.1.projection.bias", "blocks.1.norm2.weight", "blocks.1.norm2.bias",
                                             "blocks.1.mlp.gate.wg.weight", "blocks.1.mlp.experts.0.up.weight",
                                             "blocks.1.mlp.experts.0.up.bias", "blocks.1.mlp.experts.0.down.weight",
                                             "blocks.1.mlp.experts.0.down.bias", "blocks.1.mlp.experts.1.up.weight",
                                             "blocks.1.mlp.experts.1.up.bias", "blocks.1.mlp.experts.1.down.weight",
                                             "blocks.1.mlp.experts.1.down.bias", "blocks.3.mlp.gate.wg.weight"}));
  auto each = settings(2);
  each.expert_interval = 1;
  EXPECT_TRUE(make(each)->named_parameters().contains("blocks.0.mlp.gate.wg.weight"));
  each.expert_interval = 5;
  EXPECT_THROW(make(each), ConfigError);
  EXPECT_FALSE(make(settings(0))->named_parameters().contains("blocks.1.mlp.gate.wg.weight"));
}

// A gate of one expert gives it every token with weight 1.
TEST(GptExperts, OneExpertIsTheMlp) {
  auto dense = make(settings(0)), model = make(settings(1));
  {
    const torch::NoGradGuard no_grad;
    const auto from = dense->named_parameters();
    for (auto& item : model->named_parameters()) {
      auto name = item.key();
      if (name.find("wg") != std::string::npos) continue;
      if (const auto at = name.find("mlp.experts.0."); at != std::string::npos) name.erase(at, 14);
      item.value().copy_(from[name]);
    }
  }
  auto wanted = loss_of(dense), got = loss_of(model);
  EXPECT_NEAR(got.item<double>(), wanted.item<double>(), 1e-6);
  EXPECT_FALSE(dense->take_aux_loss().defined());
  const auto aux = model->take_aux_loss();
  ASSERT_TRUE(aux.defined());
  EXPECT_NEAR(aux.item<double>(), 2, 1e-6) << "1 for each of two layers";
  EXPECT_FALSE(model->take_aux_loss().defined()) << "taken";
  wanted.backward();
  (got + 0.01 * aux).backward();
  auto of_dense = gradients_of(dense);
  for (const auto& [name, gradient] : gradients_of(model)) {
    auto other = name;
    if (const auto at = name.find("mlp.experts.0."); at != std::string::npos) other.erase(at, 14);
    if (name.find("wg") != std::string::npos) continue;
    EXPECT_TRUE(torch::allclose(gradient, of_dense.at(other), 1e-4, 1e-6)) << name;
  }
}

// Segments that are computed again give the same loss, auxiliary loss and gradients, also that of the gate, which the
// auxiliary loss alone reaches if all experts are equal.
TEST(GptExperts, CheckpointedSegments) {
  for (const std::int64_t k : {1, 2}) {
    auto experts = settings(4);
    experts.k = static_cast<int>(k);
    experts.use_rts = experts.top2_2nd_expert_sampling = true;
    auto whole = make(experts), again = make(experts);
    again->run_layers_by(
        2, [](const models::GptImpl::Part& part, const at::Tensor& x) { return activation_checkpoint(part, x); });
    double losses[2], auxes[2];
    int i = 0;
    for (auto* model : {&whole, &again}) {
      const auto loss = loss_of(*model), aux = (*model)->take_aux_loss();
      losses[i] = loss.item<double>(), auxes[i++] = aux.item<double>();
      (loss + 0.5 * aux).backward();
    }
    EXPECT_EQ(losses[0], losses[1]);
    EXPECT_EQ(auxes[0], auxes[1]);
    const auto of_again = gradients_of(again);
    for (const auto& [name, gradient] : gradients_of(whole))
      EXPECT_TRUE(torch::equal(gradient, of_again.at(name))) << name;
    EXPECT_GT(of_again.at("blocks.1.mlp.gate.wg.weight").abs().max().item<double>(), 0);
  }
}

// The auxiliary loss is part of the gradient: without it, the gate's differs.
TEST(GptExperts, AuxiliaryLossReachesTheGate) {
  const auto gate = [](double factor) {
    auto model = make(settings(4));
    const auto loss = loss_of(model);
    (loss + factor * model->take_aux_loss()).backward();
    return gradients_of(model).at("blocks.3.mlp.gate.wg.weight");
  };
  EXPECT_FALSE(torch::allclose(gate(0), gate(1), 1e-3));
  EXPECT_TRUE(torch::allclose(gate(2) - gate(0), 2 * (gate(1) - gate(0)), 1e-3, 1e-6));
}

// What `zero train` differentiates: the cross entropy and a part of the auxiliary losses.
TEST(GptExperts, ShareAddsIt) {
  const auto options = Options::from_json(
      R"({"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "AdamW"}, "libzero": {"model": {"experts":
    {"num_experts": 4, "aux_loss": 0.5, "use_rts": false, "min_capacity": 0}}}})");
  auto reference = make(options.settings().model.experts), model = make(options.settings().model.experts);
  const auto wanted = loss_of(reference), aux = reference->take_aux_loss();
  (wanted + 0.5 * aux).backward();
  const auto mesh = Mesh::of(options, Communicator::local());
  Engine engine(model, options, mesh);
  cli::GptShare share(model, *mesh, options);
  const auto loss = share.loss_of(tokens());
  EXPECT_NEAR(loss.item<double>(), wanted.item<double>(), 1e-6) << "without the auxiliary loss";
  share.backward(engine, loss, 3);
  EXPECT_NEAR(share.last_aux_loss().item<double>(), aux.item<double>(), 1e-6);
  for (const auto& [name, gradient] : gradients_of(reference))
    EXPECT_TRUE(torch::allclose(engine.gradient(name), gradient, 1e-4, 1e-6)) << name;
}

TEST(GptExperts, CountsOfForwards) {
  auto experts = settings(4);
  experts.k = 2;
  experts.capacity_factor = 0.5;  // ceil(30 / 4 * 0.5 * 2) = 8 of each
  auto model = make(experts);
  cli::ExpertCounter counter(model);
  std::vector<std::int64_t> by_hand;
  for (int forward = 0; forward < 3; ++forward) {
    const auto loss = loss_of(model);
    counter.note();
    std::vector<std::int64_t> numbers;
    for (const auto& module : model->modules())
      if (const auto* moe = dynamic_cast<const MoEImpl*>(module.get())) {
        const auto counts = moe->last_counts();
        std::int64_t kept = 0;
        for (int e = 0; e < 4; ++e) {
          numbers.push_back(counts[e].item<std::int64_t>());
          kept += std::min<std::int64_t>(numbers.back(), 8);
        }
        numbers.push_back(kept);
      }
    by_hand.resize(numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) by_hand[i] += numbers[i];
  }
  ASSERT_EQ(by_hand.size(), 10u);
  const auto numbers = counter.take();
  EXPECT_EQ(numbers, by_hand);
  const auto load = counter.load_of(numbers, 7);
  ASSERT_EQ(load.layers.size(), 2u);
  EXPECT_EQ(load.layers[0].block, 1);
  EXPECT_EQ(load.layers[1].block, 3);
  EXPECT_EQ(load.layers[1].sum(), 3 * 30 * 2);
  EXPECT_EQ(load.layers[1].kept, by_hand[9]);
  EXPECT_GT(load.dropped(), 0);
  EXPECT_EQ(counter.take(), std::vector<std::int64_t>(10)) << "taken";
  const models::Gpt dense = make(settings(0));
  EXPECT_FALSE(cli::ExpertCounter(dense).any());
}

}  // namespace
}  // namespace zero::test::gpt_experts_test
