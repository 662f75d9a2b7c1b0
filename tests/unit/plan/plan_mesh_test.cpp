// Plans of meshes: the part of a model that a tensor-parallel rank holds, and the bytes of activations that it sends.
// The figures were computed by hand from the formulas of docs/parallelism.md, for tensor parallelism as in Megatron-LM
// (arXiv:1909.08053), partitioned checkpoints as in ZeRO (arXiv:1910.02054, section 8) and Ulysses (arXiv:2309.14509).
#include <gtest/gtest.h>
#include <zero/errors.h>
#include <zero/plan.h>

#include "plan/formulas.h"
#include "plan/mesh_parts.h"
#include "tools/support/gpt_plan.h"

namespace zero::plan_mesh_test {
namespace {

using planning::Parameter;

Options options_of(const std::string& keys, std::int64_t micro = 1) {
  return Options::from_json(R"({"train_micro_batch_size_per_gpu": )" + std::to_string(micro) +
                            R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}})" + keys + "}");
}

std::string tensor(int degree, const std::string& more = "") {
  return R"(, "tensor_parallel": {"autotp_size": )" + std::to_string(degree) + more + "}";
}

std::int64_t numel(const std::vector<Parameter>& parameters) {
  std::int64_t sum = 0;
  for (const auto& parameter : parameters) sum += parameter.numel;
  return sum;
}

std::int64_t part_of(const PlanModel& model, const std::string& keys) {
  return numel(planning::parts_of(model, options_of(keys).settings()));
}

TEST(PlanMesh, ElementsOfOneTensorParallelRank) {
  const struct {
    const char* model;
    std::int64_t whole, part;
  } models[] = {{"gpt-1m", 1'058'400, 540'288}, {"gpt-10m", 9'968'384, 5'038'288}, {"gpt2", 124'439'808, 62'641'536}};
  for (const auto& [name, whole, part] : models) {
    const auto model = PlanModel::named(name);
    EXPECT_EQ(part_of(model, ""), whole) << name;
    // `part` is the mean over the ranks. 50257 rows are 25128 + 25129, and the largest part is planned: half a row of
    // 768 more.
    EXPECT_EQ(part_of(model, tensor(2)), part + (std::string(name) == "gpt2" ? 384 : 0)) << name;
  }
  const std::string without_tokens = R"(, "partition_config": {"use_default_specs": false, "layer_specs": [
    {"patterns": ["blocks\\.\\d+\\.qkv\\.weight"], "partition_type": "column", "shape": [3, -1]},
    {"patterns": ["blocks\\.\\d+\\.(projection|down)\\.weight"], "partition_type": "row"},
    {"patterns": ["blocks\\.\\d+\\.up\\.weight"], "partition_type": "column"}]})";
  EXPECT_EQ(part_of(PlanModel::named("gpt-1m"), tensor(2, without_tokens)), 558'720);
  EXPECT_EQ(part_of(PlanModel::named("gpt2"), tensor(2, without_tokens)), 81'940'224);
}

TEST(PlanMesh, EveryFamilyHasACut) {
  for (const char* name : {"bert-base", "t5-small", "llama-3-8b", "gpt2-xl"}) {
    const auto model = PlanModel::named(name);
    const auto whole = static_cast<double>(part_of(model, ""));
    EXPECT_NEAR(static_cast<double>(part_of(model, tensor(2))) / whole, 0.5, 0.03) << name;
    EXPECT_LT(part_of(model, tensor(4)), part_of(model, tensor(2))) << name;
  }
  const auto counted = PlanModel::of_count(7.5e9);
  EXPECT_EQ(part_of(counted, ""), 7'500'000'000);
  EXPECT_NEAR(static_cast<double>(part_of(counted, tensor(4))) / 7.5e9, 0.25, 0.002);
}

Plan plan_of(const PlanModel& model, const std::string& keys, int world, std::int64_t micro) {
  PlanMachine machine;
  machine.gpu = false;
  machine.ranks_per_host = world;
  machine.shared_memory = true;
  return plan(cli::with_gpt_pass(model), options_of(keys, micro), machine);
}

TEST(PlanMesh, BytesOfTensorParallelism) {
  const auto bytes = [](int segments, bool divided_logits) {
    std::string keys = tensor(2, divided_logits ? R"(, "vocab_parallel_lm_head": true)" : "");
    if (segments > 0)
      keys += R"(, "activation_checkpointing": {"number_checkpoints": )" + std::to_string(segments) + "}";
    return plan_of(PlanModel::named("gpt-1m"), keys, 2, 2).traffic.tensor_parallel;
  };
  EXPECT_EQ(bytes(0, true), 2'657'280u);
  EXPECT_EQ(bytes(0, false), 2'785'280u);
  EXPECT_EQ(bytes(4, true), 3'247'104u);
  EXPECT_EQ(bytes(4, false), 3'375'104u);
  EXPECT_EQ(bytes(2, true), 3'542'016u);
  EXPECT_EQ(bytes(2, false), 3'670'016u);
}

// ZeRO, section 8: the four blocks of a GPT, fp32, and any parameters.
TEST(PlanMesh, VolumesOfABlock) {
  const planning::Transformer small{.layers = 4, .hidden = 16, .heads = 2, .sequence = 8, .batch = 2};
  EXPECT_EQ(4 * planning::tensor_parallel_bytes_of_layer(small, 4, 2), 24'576);
  EXPECT_EQ(planning::tensor_parallel_bytes_of_layer(small, 4, 1), 0);
  EXPECT_EQ(planning::zero_bytes_of_layer(2, 1000, 2), 1000);
  EXPECT_EQ(planning::zero_bytes_of_layer(3, 1000, 2), 1500);
}

// Stages 0 to 2 send 2 and stage 3 sends 3 times the part's bytes; ZeRO's own formulas with the part for the whole.
TEST(PlanMesh, ZeroShardsTheParts) {
  const auto model = PlanModel::named("gpt-1m");
  for (int stage = 0; stage <= 3; ++stage) {
    const auto keys = tensor(2) + R"(, "zero_optimization": {"stage": )" + std::to_string(stage) + "}";
    const auto planned = plan_of(model, keys, 4, 2);
    EXPECT_EQ(planned.data, 2);
    EXPECT_EQ(planned.tensor, 2);
    EXPECT_EQ(planned.parameters, 540'288);
    const auto sent = static_cast<double>(planned.traffic.gathered + planned.traffic.reduced);
    EXPECT_NEAR(sent / (stage == 3 ? 3'241'728 : 2'161'152), 1, 0.001) << "stage " << stage;
  }
}

TEST(PlanMesh, BytesOfPartitionedActivations) {
  PlanModel model;
  model.layers = 4, model.hidden = 16, model.heads = 2, model.sequence = 8, model.vocabulary = 32;
  const auto bytes = [&](bool divided) {
    return plan_of(model,
                   tensor(2) + R"(, "activation_checkpointing": {"number_checkpoints": 4, "partition_activations": )" +
                       (divided ? "true}" : "false}"),
                   2, 2)
        .traffic.tensor_parallel;
  };
  EXPECT_EQ(bytes(true) - bytes(false), 2048u);
}

TEST(PlanMesh, BytesOfUlysses) {
  const auto forward = [](PlanModel model, int degree, std::int64_t samples) {
    const auto options = options_of(R"(, "sequence_parallel_size": )" + std::to_string(degree), samples);
    const auto parts = planning::parts_of(model, options.settings());
    std::int64_t sum = 0;
    for (const auto& exchange : planning::exchanges_of({.model = model,
                                .settings = options.settings(),
                                .share = planning::share_of(model, options.settings(), parts),
                                .samples = samples}))
      if (exchange.operation == "sp.all_to_all" && exchange.phase == "forward") sum += exchange.bytes;
    return sum;
  };
  const auto shape = [](std::int64_t hidden, std::int64_t heads, std::int64_t kv_heads) {
    PlanModel model;
    model.layers = 1, model.hidden = hidden, model.heads = heads, model.sequence = 64, model.kv_heads = kv_heads;
    if (kv_heads > 0) model.kind = PlanModel::Kind::Llama;
    return model;
  };
  EXPECT_EQ(forward(shape(32, 4, 0), 2, 2), 16'384);
  EXPECT_EQ(forward(shape(32, 4, 0), 4, 2), 12'288);
  EXPECT_EQ(forward(shape(56, 7, 0), 4, 1), 10'752);
  EXPECT_EQ(forward(shape(64, 8, 2), 2, 1), 10'240);
}

TEST(PlanMesh, Refusals) {
  const auto model = PlanModel::named("gpt-1m");  // 4 heads
  EXPECT_THROW(plan_of(model, tensor(3), 4, 1), ConfigError) << "4 ranks";
  EXPECT_THROW(plan_of(model, tensor(8), 8, 1), ConfigError) << "8 parts of 4 heads";
  EXPECT_NO_THROW(plan_of(model, tensor(3), 3, 1));
}

// A model t times as large fits t times as many ranks, less what tensor parallelism repeats: norms and some biases.
TEST(PlanMesh, LargestModelIsAlmostTimesTheDegree) {
  const auto largest = [](int degree) {
    PlanMachine machine;
    machine.hosts = 8 * degree, machine.ranks_per_host = 8;
    machine.device_bytes = 32'000'000'000;
    const auto keys = (degree > 1 ? tensor(degree) : std::string()) +
                      R"(, "bf16": {"enabled": true}, "zero_optimization": {"stage": 1})";
    return static_cast<double>(plan(PlanModel::of_count(1e9), options_of(keys), machine).largest_model);
  };
  const double one = largest(1);
  EXPECT_NEAR(largest(2) / one, 2, 0.06);
  EXPECT_NEAR(largest(4) / one, 4, 0.2);
}

}  // namespace
}  // namespace zero::plan_mesh_test
