// Cuts of tensors against a loop over their elements, and which parameters a plan cuts.
#include <zero/errors.h>

#include "sharding/tensor_cut.h"

#include <gtest/gtest.h>
#include <zero/errors.h>
#include <zero/options.h>

#include <random>
#include <set>
#include <tuple>

#include "sharding/cut_plan.h"

namespace zero::test::tensor_cut_test {
namespace {

using sharding::CutKind;
using sharding::TensorCut;

std::vector<std::int64_t> lengths(std::int64_t n, std::int64_t multiple, int parts) {
  std::vector<std::int64_t> result;
  for (int j = 0; j < parts; ++j) result.push_back(sharding::cut_range(n, multiple, j, parts).numel());
  return result;
}

TEST(TensorCut, Lengths) {
  using V = std::vector<std::int64_t>;
  EXPECT_EQ(lengths(50257, 1, 2), (V{25128, 25129}));
  EXPECT_EQ(lengths(1600, 64, 2), (V{768, 832}));  // the 25 heads of gpt2-xl
  EXPECT_EQ(lengths(768, 64, 8), (V{64, 128, 64, 128, 64, 128, 64, 128}));
}

// The logical elements that a part holds, found by looking at every element of the tensor.
std::vector<std::int64_t> elements_of(const TensorCut& cut, int part) {
  const auto rows = cut.sizes[0], columns = cut.sizes.size() > 1 ? cut.sizes[1] : 1;
  const auto ranges = cut.ranges(part);
  std::vector<std::int64_t> held;
  const auto indices = [&](int dim, std::int64_t n) {
    std::vector<std::int64_t> all;
    if (dim != cut.dim)
      for (std::int64_t i = 0; i < n; ++i) all.push_back(i);
    else
      for (const auto& range : ranges)
        for (std::int64_t i = range.begin; i < range.end; ++i) all.push_back(i);
    return all;
  };
  for (const auto row : indices(0, rows))
    for (const auto column : indices(1, columns)) held.push_back(row * columns + column);
  return held;
}

TEST(TensorCut, RunsOfARowCut) {
  const TensorCut cut{.sizes = {4, 6}, .dim = 1, .pieces = {}, .multiple = 1, .parts = 3};
  std::vector<std::int64_t> elements;
  for (const auto& run : cut.runs(1, 1, 6))
    for (std::int64_t i = 0; i < run.numel; ++i) elements.push_back(run.whole_begin + i);
  EXPECT_EQ(elements, (std::vector<std::int64_t>{3, 8, 9, 14, 15}));
}

TEST(TensorCut, RunsAndSizesOfRandomCuts) {
  std::mt19937 random(7);
  const auto upto = [&](int n) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(n)) + 1; };
  for (int trial = 0; trial < 500; ++trial) {
    TensorCut cut;
    cut.parts = static_cast<int>(upto(4));
    cut.multiple = upto(3);
    cut.dim = static_cast<int>(random() % 2);
    const auto pieces = upto(3);
    std::int64_t length = 0;
    for (std::int64_t i = 0; i < pieces; ++i) {
      cut.pieces.push_back((cut.parts + upto(5) - 1) * cut.multiple);
      length += cut.pieces.back();
    }
    if (pieces == 1 && random() % 2 == 0) cut.pieces.clear();
    cut.sizes = cut.dim == 0 ? std::vector<std::int64_t>{length, upto(5)} : std::vector<std::int64_t>{upto(5), length};
    ASSERT_EQ(cut.fault(), "");
    std::multiset<std::int64_t> all;
    for (int part = 0; part < cut.parts; ++part) {
      const auto held = elements_of(cut, part);
      ASSERT_EQ(cut.part_numel(part), static_cast<std::int64_t>(held.size()));
      all.insert(held.begin(), held.end());
      const auto begin = static_cast<std::int64_t>(random() % (held.size() + 1));
      const auto end =
          begin + static_cast<std::int64_t>(random() % (held.size() - static_cast<std::size_t>(begin) + 1));
      auto next = begin;
      for (const auto& run : cut.runs(part, begin, end)) {
        ASSERT_EQ(run.part_begin, next);
        for (std::int64_t i = 0; i < run.numel; ++i)
          ASSERT_EQ(run.whole_begin + i, held[static_cast<std::size_t>(next + i)]);
        next += run.numel;
      }
      ASSERT_EQ(next, end);
    }
    ASSERT_EQ(all.size(), static_cast<std::size_t>(cut.numel()));  // every element once
    ASSERT_EQ(std::set<std::int64_t>(all.begin(), all.end()).size(), all.size());
  }
}

// --- plans --------------------------------------------------------------------------------------

const std::vector<sharding::NamedShape>& gpt() {
  static const std::vector<sharding::NamedShape> shapes{
      {"token.weight", {}, {23, 24}},         {"position.weight", {}, {8, 24}},
      {"blocks.0.norm1.weight", {}, {24}},    {"blocks.0.qkv.weight", {}, {72, 24}},
      {"blocks.0.qkv.bias", {}, {72}},        {"blocks.0.projection.weight", {}, {24, 24}},
      {"blocks.0.projection.bias", {}, {24}}, {"blocks.0.up.weight", {}, {96, 24}},
      {"blocks.0.up.bias", {}, {96}},         {"blocks.0.down.weight", {}, {24, 96}}};
  return shapes;
}

std::vector<sharding::ParameterCut> plan(const std::string& tensor_parallel,
                                         const std::vector<sharding::NamedShape>& parameters = gpt()) {
  const auto options =
      Options::from_json(R"({"train_batch_size": 4, "tensor_parallel": {"autotp_size": 2)" + tensor_parallel + "}}");
  return sharding::cut_plan(options.settings(), parameters);
}

std::string fault_of(const std::string& tensor_parallel, const std::vector<sharding::NamedShape>& parameters = gpt()) {
  try {
    plan(tensor_parallel, parameters);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "none";
}

TEST(CutPlan, Preset) {
  const auto cuts = plan(R"(, "preset_model": "gpt")");
  const CutKind kinds[] = {CutKind::Column, CutKind::Whole, CutKind::Whole,  CutKind::Column, CutKind::Column,
                           CutKind::Row,    CutKind::Whole, CutKind::Column, CutKind::Column, CutKind::Row};
  for (std::size_t i = 0; i < cuts.size(); ++i) EXPECT_EQ(cuts[i].kind, kinds[i]) << gpt()[i].name;
  EXPECT_TRUE(cuts[0].gather_output);  // the tied head gives whole logits
  EXPECT_EQ(cuts[0].cut.part_sizes(0), (std::vector<std::int64_t>{11, 24}));
  EXPECT_EQ(cuts[3].cut.pieces, (std::vector<std::int64_t>{24, 24, 24}));
  EXPECT_EQ(cuts[4].cut.part_sizes(1), (std::vector<std::int64_t>{36}));
  EXPECT_FALSE(plan(R"(, "preset_model": "gpt", "vocab_parallel_lm_head": true)")[0].gather_output);
}

// MultiheadAttention is recognized by all of its weights' names: a parameter of the program may have one of them.
TEST(CutPlan, ParametersNamedAsThoseOfAttention) {
  const auto fault_with = [](std::vector<std::pair<std::string, std::int64_t>> weights) {
    std::vector<sharding::NamedShape> all{{"up.weight", {}, {8, 4}}};
    for (const auto& [name, rows] : weights) all.push_back({name, {}, {rows, 4}});
    return fault_of(R"(, "partition_config": {"use_default_specs": false, "layer_specs": [
      {"patterns": ["up"]}, {"patterns": [".*out_proj"], "partition_type": "skip"}, {"patterns": [".*_proj_weight"]}]})",
                    all);
  };
  for (const std::string path : {"", "a.b."}) {
    SCOPED_TRACE(path);
    const auto one = path + "q_proj_weight", in = path + "in_proj_weight", out = path + "out_proj.weight";
    EXPECT_EQ(fault_with({{one, 4}}).find("MultiheadAttention"), std::string::npos);
    for (const auto& weights : std::vector<std::vector<std::pair<std::string, std::int64_t>>>{
             {{one, 4}},
             {{in, 12}},
             {{one, 4}, {out, 4}},
             {{in, 12}, {"other.out_proj.weight", 4}},
             {{path + "my_in_proj_weight", 12}, {out, 4}},
             {{path + "in_proj_weight_of_mine", 12}, {out, 4}},
             {{one, 4}, {path + "k_proj_weight", 4}, {"other.v_proj_weight", 4}, {out, 4}}})
      EXPECT_EQ(fault_with(weights).find("MultiheadAttention"), std::string::npos) << fault_with(weights);
    EXPECT_NE(fault_with({{in, 12}, {out, 4}}).find(in + " [12, 4] ("), std::string::npos);
    EXPECT_NE(fault_with({{in, 12}, {out, 4}}).find("MultiheadAttention takes"), std::string::npos);
    const auto text = fault_with({{one, 4}, {path + "k_proj_weight", 4}, {path + "v_proj_weight", 4}, {out, 4}});
    for (const char* name : {"q_proj_weight", "k_proj_weight", "v_proj_weight"})
      EXPECT_NE(text.find(path + name + " [4, 4] ("), std::string::npos) << text;
  }
}

// The weights of one layer by Hugging Face's names: kind and number of pieces.
TEST(CutPlan, PresetsOfKnownModels) {
  struct Known {
    const char* preset;
    std::vector<std::tuple<const char*, std::vector<std::int64_t>, CutKind, std::size_t>> weights;
  };
  const auto column = CutKind::Column, row = CutKind::Row, whole = CutKind::Whole;
  const std::vector<Known> all{
      {"llama",
       {{"model.layers.0.self_attn.q_proj.weight", {16, 8}, column, 0},
        {"model.layers.0.self_attn.k_proj.weight", {4, 8}, column, 0},
        {"model.layers.0.self_attn.o_proj.weight", {8, 16}, row, 0},
        {"model.layers.0.mlp.gate_proj.weight", {24, 8}, column, 0},
        {"model.layers.0.mlp.down_proj.weight", {8, 24}, row, 0},
        {"model.layers.0.input_layernorm.weight", {8}, whole, 0},
        {"lm_head.weight", {32, 8}, whole, 0}}},
      {"qwen2",
       {{"model.layers.0.self_attn.v_proj.weight", {4, 8}, column, 0},
        {"model.layers.0.self_attn.v_proj.bias", {4}, column, 0},
        {"model.layers.0.mlp.up_proj.weight", {24, 8}, column, 0}}},
      {"phi3",
       {{"model.layers.0.self_attn.qkv_proj.weight", {24, 8}, column, 3},
        {"model.layers.0.self_attn.o_proj.weight", {8, 8}, row, 0},
        {"model.layers.0.mlp.gate_up_proj.weight", {32, 8}, column, 2},
        {"model.layers.0.mlp.down_proj.weight", {8, 16}, row, 0}}},
      {"bloom",
       {{"transformer.h.0.self_attention.query_key_value.weight", {24, 8}, column, 0},
        {"transformer.h.0.self_attention.dense.weight", {8, 8}, row, 0},
        {"transformer.h.0.mlp.dense_h_to_4h.weight", {32, 8}, column, 0},
        {"transformer.h.0.mlp.dense_4h_to_h.bias", {8}, whole, 0},
        {"transformer.h.0.mlp.dense_4h_to_h.weight", {8, 32}, row, 0}}},
      {"chatglm",
       {{"transformer.encoder.layers.0.self_attention.query_key_value.weight", {24, 8}, column, 3},
        {"transformer.encoder.layers.0.self_attention.dense.weight", {8, 8}, row, 0},
        {"transformer.encoder.layers.0.mlp.dense_h_to_4h.weight", {32, 8}, column, 2},
        {"transformer.encoder.layers.0.mlp.dense_4h_to_h.weight", {8, 16}, row, 0}}}};
  for (const auto& known : all) {
    std::vector<sharding::NamedShape> shapes;
    for (const auto& [name, sizes, kind, pieces] : known.weights) shapes.push_back({name, {}, sizes});
    const auto cuts = plan(R"(, "preset_model": ")" + std::string(known.preset) + "\"", shapes);
    for (std::size_t i = 0; i < known.weights.size(); ++i) {
      const auto& [name, sizes, kind, pieces] = known.weights[i];
      EXPECT_EQ(cuts[i].kind, kind) << name;
      EXPECT_EQ(cuts[i].cut.pieces.size(), pieces) << name;
    }
  }
}

TEST(CutPlan, FirstEntryDecides) {
  const auto cuts = plan(R"(, "preset_model": "gpt", "partition_config": {"layer_specs": [
      {"patterns": ["token"], "partition_type": "skip"},
      {"patterns": ["blocks\\.0\\.up\\.weight"], "partition_type": "column", "gather_output": true}]})");
  EXPECT_EQ(cuts[0].kind, CutKind::Whole);
  EXPECT_TRUE(cuts[7].gather_output);
  EXPECT_EQ(cuts[8].kind, CutKind::Whole);  // a bias is added to the gathered output
}

TEST(CutPlan, GradientsOfAWeightAndItsBiasAreSummed) {
  const auto cuts = plan(R"(, "partition_config": {"use_default_specs": false, "layer_specs": [
      {"patterns": ["blocks.0.up.weight"]},
      {"patterns": ["blocks.0.projection.weight"], "partition_type": "skip", "grad_allreduce": true}]})");
  for (std::size_t i = 0; i < cuts.size(); ++i)
    EXPECT_EQ(cuts[i].sum_gradient, gpt()[i].name.find("projection") != std::string::npos) << gpt()[i].name;
  EXPECT_EQ(cuts[7].kind, CutKind::Column);  // without partition_type
}

TEST(CutPlan, Faults) {
  const auto specs = [](const std::string& list) {
    return R"(, "partition_config": {"use_default_specs": false, "layer_specs": [)" + list + "]}";
  };
  EXPECT_NE(
      fault_of("").find("preset_model for a known model, or layer_specs for these weights:\n  token.weight [23, 24]"),
      std::string::npos)
      << fault_of("");
  const auto nothing = fault_of(R"(, "preset_model": "llama")");
  EXPECT_NE(nothing.find("got 2 with a plan that cuts no parameter. Hint: preset_model"), std::string::npos) << nothing;
  const auto all = fault_of(specs(R"({"patterns": ["nothing"], "partition_type": "row"},
      {"patterns": [".*norm1.weight"], "partition_type": "column"},
      {"patterns": [".*qkv.weight"], "partition_type": "column", "shape": [[24, 24], -1]},
      {"patterns": [".*up.weight"], "partition_type": "column", "multiple": 7},
      {"patterns": ["position.weight"], "partition_type": "column", "multiple": 8})"));
  for (const char* part :
       {"(nothing) matches no parameter", "blocks.0.norm1.weight [24]", "expected a weight of two",
        "has 72 elements, expected 48, the sum of its pieces", "has 96 elements, expected a multiple of 7",
        "has 1 head or block, expected at least 2, one a rank. Hint: tensor_parallel.autotp_size 1\n"})
    EXPECT_NE(all.find(part), std::string::npos) << part << " in " << all;
  EXPECT_NE(fault_of(R"(, "preset_model": "gpt", "partition_config": {"strict_mode": true})")
                .find("position.weight [8, 24] matches no entry"),
            std::string::npos);
}

TEST(CutPlan, FaultsOfTheConfiguration) {
  const auto fault = [](const std::string& spec) {
    return fault_of(R"(, "partition_config": {"layer_specs": [{)" + spec + "}]}");
  };
  const auto expect = [&](const std::string& spec, const std::string& part) {
    EXPECT_NE(fault(spec).find(part), std::string::npos) << fault(spec);
  };
  expect(R"("patterns": ["a"], "partition_typo": "row")", "did you mean partition_type?");
  expect(R"("patterns": ["a"], "partition_type": "rows")", "expected column, row or skip");
  expect(R"("patterns": ["(a"], "partition_type": "row")", "expected a regular expression");
  expect(R"("patterns": ["(a)\\1"], "partition_type": "row")", "backreference");
  expect(R"("patterns": ["a"], "partition_type": "row", "shape": [3, -1])", "not cut by columns");
  expect(R"("patterns": ["a"], "partition_type": "column", "multiple": 0)", "at least 1");
  expect(R"("partition_type": "column")", "at least one");
  expect(R"("patterns": ["a"], "partition_type": "column", "partition_dim": 1)", "expected 0 for column");
}

}  // namespace
}  // namespace zero::test::tensor_cut_test
