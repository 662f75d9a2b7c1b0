// Plans of models with experts, against figures from docs/parallelism.md and sums by hand.
#include <gtest/gtest.h>
#include <zero/errors.h>
#include <zero/plan.h>

#include <cmath>

#include "config/settings.h"
#include "plan/formulas.h"
#include "plan/mesh_parts.h"
#include "plan/model.h"
#include "sharding/expert_capacity.h"
#include "tools/support/gpt_plan.h"

namespace zero::plan_experts_test {
namespace {

Options options_of(const std::string& experts, const std::string& keys = "", std::int64_t micro = 1) {
  return Options::from_json(R"({"train_micro_batch_size_per_gpu": )" + std::to_string(micro) +
                            R"(, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW"},
                               "libzero": {"model": {"experts": {)" +
                            experts + "}}}" + keys + "}");
}

// 4 layers, of which blocks 1 and 3 have experts.
PlanModel model_of(const Options& options) {
  PlanModel model;
  model.layers = 4, model.hidden = 64, model.heads = 4, model.sequence = 32, model.vocabulary = 256;
  model.experts = planning::experts_of(options.settings().model.experts);
  return cli::with_gpt_pass(model);
}

Plan plan_of(const Options& options, int world, bool shared_memory = true) {
  PlanMachine machine;
  machine.gpu = false;
  machine.ranks_per_host = world;
  machine.shared_memory = shared_memory;
  return plan(model_of(options), options, machine);
}

// bf16 and Adam, 10 M dense parameters and 8 experts of 1 M, 4 ranks; MB of a rank at stages 0 to 3.
TEST(PlanExperts, BytesOfStates) {
  const struct {
    int ep;
    double mb[4];
  } table[] = {{1, {288, 126, 99, 72}}, {2, {224, 110, 91, 72}}, {4, {192, 102, 87, 72}}};
  for (const auto& [ep, mb] : table)
    for (int stage = 0; stage <= 3; ++stage)
      EXPECT_DOUBLE_EQ(planning::expert_state_bytes(planning::kMixedAdam, stage, 10e6, 8e6, 4, ep), mb[stage] * 1e6)
          << "ep " << ep << ", stage " << stage;
}

// The same through the planner: parameters, gradients, masters and moments of a rank are those of the formula, but for
// padding.
TEST(PlanExperts, StatesAreTheFormulas) {
  for (const int ep : {1, 2, 4})
    for (int stage = 0; stage <= 3; ++stage) {
      const auto options = options_of(R"("num_experts": 8, "ep_size": )" + std::to_string(ep),
                                      R"(, "zero_optimization": {"stage": )" + std::to_string(stage) + "}");
      const auto planned = plan_of(options, 4, /*shared_memory=*/false);
      const double expert = 8 * 64 * 64 + 5 * 64, experts = 2 * 8 * expert;
      const double dense = static_cast<double>(model_of(options).num_parameters()) - experts;
      double bytes = 0;
      for (const auto purpose : {MemoryReport::Purpose::Parameters, MemoryReport::Purpose::Gradients,
                                 MemoryReport::Purpose::MasterParameters, MemoryReport::Purpose::OptimizerStates})
        bytes += static_cast<double>(planned.memory.peak(MemoryReport::Tier::Device, purpose));
      const auto formula = planning::expert_state_bytes(planning::kMixedAdam, stage, dense, experts, 4, ep);
      EXPECT_NEAR(bytes / formula, 1, 0.02) << "ep " << ep << ", stage " << stage;
      EXPECT_EQ(planned.expert, ep);
      EXPECT_EQ(planned.parameters, static_cast<std::int64_t>(dense + experts / ep));
    }
}

TEST(PlanExperts, Parameters) {
  const auto dense = model_of(options_of("")).num_parameters();
  const std::int64_t h = 64, mlp = 8 * h * h + 5 * h;
  const auto model = model_of(options_of(R"("num_experts": 8, "k": 2)"));
  EXPECT_EQ(model.num_parameters(), dense + 2 * (8 * h + 7 * mlp));
  EXPECT_EQ(model.num_active_parameters(), dense + 2 * (8 * h + mlp));
  const auto residual = model_of(options_of(R"("num_experts": 8, "expert_interval": 4, "use_residual": true)"));
  EXPECT_EQ(residual.num_parameters(), dense + 8 * h + 8 * mlp + 2 * h + 2);
  EXPECT_EQ(model_of(options_of("")).num_active_parameters(), dense);
}

// Of a micro-batch of 32 tokens, bf16: each of two layers sends rows to experts and back, in forward and in backward,
// and the numbers of rows once.
TEST(PlanExperts, BytesOfExchanges) {
  const auto bytes = [](const std::string& experts, int ep, const std::string& keys = "") {
    return plan_of(options_of(R"("num_experts": 8, "ep_size": )" + std::to_string(ep) + experts, keys), 4)
        .traffic.expert_parallel;
  };
  EXPECT_EQ(bytes("", 1), 0u);
  const std::uint64_t row = 64 * 2, numbers = 8 * 8;
  EXPECT_EQ(bytes("", 2), 2 * (4 * 32 * row + numbers) / 2);
  EXPECT_EQ(bytes("", 4), 2 * (4 * 32 * row + numbers) * 3 / 4);
  EXPECT_EQ(bytes(R"(, "k": 2, "drop_tokens": false)", 2), 2 * (4 * 64 * row + numbers) / 2);
  // 32 / 8 * 0.5 = 2 tokens of each expert.
  EXPECT_EQ(bytes(R"(, "capacity_factor": 0.5, "min_capacity": 0)", 2), 2 * (4 * 16 * row + numbers) / 2);
  EXPECT_EQ(bytes("", 2, R"(, "activation_checkpointing": {"number_checkpoints": 4})"),
            2 * (6 * 32 * row + numbers) / 2);
  EXPECT_EQ(bytes("", 2, R"(, "gradient_accumulation_steps": 3)"), 3 * 2 * (4 * 32 * row + numbers) / 2);
}

// An expert computes its part of the rows: E experts need the work of one MLP, and the gate's.
TEST(PlanExperts, Work) {
  const auto flops = [](const std::string& experts) {
    return plan_of(options_of(experts + (experts.empty() ? "" : ", ") + R"("aux_loss": 0)"), 1).work.flops;
  };
  const double mlp = 3 * 2.0 * 32 * (8 * 64 * 64 + 5 * 64), gate = 3 * 2.0 * 32 * 8 * 64;
  EXPECT_NEAR(flops(R"("num_experts": 8, "drop_tokens": false)") - flops(""), 2 * gate, 1);
  EXPECT_NEAR(flops(R"("num_experts": 8, "drop_tokens": false, "k": 2)") - flops(""), 2 * (gate + mlp), 1);
}

TEST(PlanExperts, UnitsOfTheirOwn) {
  const auto options = options_of(R"("num_experts": 8, "ep_size": 2, "use_residual": true)");
  const auto parts = planning::parts_of(model_of(options), options.settings());
  const auto units = planning::cut_into_units(parts, options.settings(), 4, 2, false);
  std::vector<std::string> names;
  for (const auto& unit : units) names.push_back(unit.name);
  EXPECT_EQ(names, (std::vector<std::string>{"root", "blocks.0", "blocks.1", "blocks.1.mlp.experts", "blocks.2",
                                             "blocks.3", "blocks.3.mlp.experts"}));
  EXPECT_EQ(units[3].axis, 1);
  EXPECT_EQ(units[3].layout.world(), 2);
  EXPECT_EQ(units[3].numel(), 4 * (8 * 64 * 64 + 5 * 64));
  EXPECT_EQ(units[2].axis, 0);
  EXPECT_EQ(units[2].layout.world(), 4);
}

TEST(PlanExperts, TheConfigurationKeepsThem) {
  const auto options = options_of(R"("num_experts": 8, "ep_size": 2, "k": 2)");
  const auto planned = plan_of(options, 4);
  const auto again = Options::from_json(plan_config(model_of(options), options, planned, ""));
  EXPECT_EQ(again.settings().model.experts.num_experts, 8);
  EXPECT_EQ(again.settings().model.experts.ep_size, 2);
  EXPECT_EQ(PlanModel::of_options(again).num_parameters(), model_of(options).num_parameters());
}

TEST(PlanExperts, Refusals) {
  EXPECT_THROW(plan_of(options_of(R"("num_experts": 6, "ep_size": 3)"), 4), ConfigError);
  EXPECT_THROW(options_of(R"("num_experts": 8, "ep_size": 3)"), ConfigError);
  EXPECT_THROW(options_of(R"("num_experts": 2, "k": 3)"), ConfigError);
  EXPECT_THROW(options_of(R"("num_experts": 2, "k": 2, "noisy_gate_policy": "RSample")"), ConfigError);
  EXPECT_THROW(options_of(R"("num_experts": 2)", R"(, "tensor_parallel": {"autotp_size": 2, "preset_model": "gpt"})"),
               ConfigError);
  auto llama = PlanModel::named("llama-3-8b");
  llama.experts.count = 8;
  EXPECT_THROW(llama.validate(), ConfigError);
  EXPECT_NO_THROW(options_of(R"("num_experts": 0, "k": 3, "ep_size": 7)"));
}

}  // namespace
}  // namespace zero::plan_experts_test
