// The papers' tables, cell by cell as they are printed there; and the parameter counts of published models.
#include <gtest/gtest.h>

#include <zero/errors.h>
#include <zero/plan.h>

#include <map>
#include <string>
#include <vector>

#include "plan/formulas.h"
#include "plan/model.h"
#include "plan/units.h"

namespace zero::plan_papers_test {
namespace {

using Rows = std::vector<std::vector<std::string>>;

void expect_rows(const PaperTable& table, const Rows& expected) {
  ASSERT_EQ(table.rows.size(), expected.size()) << table.title;
  for (std::size_t r = 0; r < expected.size(); ++r) {
    ASSERT_EQ(table.rows[r].size(), expected[r].size()) << table.title << ", row " << r;
    for (std::size_t c = 0; c < expected[r].size(); ++c)
      EXPECT_EQ(table.rows[r][c], expected[r][c]) << table.title << ", row " << r << ", column " << table.header[c];
  }
}

PaperTable only(const char* name) {
  const auto tables = paper_tables(name);
  EXPECT_EQ(tables.size(), 1u);
  return tables.at(0);
}

TEST(Papers, ZeroTable1) {
  const auto table = only("table1");
  EXPECT_EQ(table.header, (std::vector<std::string>{"DP", "7.5B os", "7.5B os+g", "7.5B os+g+p", "128B os", "128B os+g",
                                                    "128B os+g+p", "1T os", "1T os+g", "1T os+g+p"}));
  expect_rows(table, {
                         {"1", "120", "120", "120", "2048", "2048", "2048", "16000", "16000", "16000"},
                         {"4", "52.5", "41.3", "30*", "896", "704", "512", "7000", "5500", "4000"},
                         {"16", "35.6", "21.6*", "7.5", "608", "368", "128", "4750", "2875", "1000"},
                         {"64", "31.4*", "16.6", "1.88", "536", "284", "32*", "4187", "2218", "250"},
                         {"256", "30.4", "15.4", "0.47", "518", "263", "8", "4046", "2054", "62.5"},
                         {"1024", "30.1", "15.1", "0.12", "513", "257", "2", "4011", "2013", "15.6*"},
                     });
}

TEST(Papers, ZeroTable2) {
  expect_rows(only("table2"), {
                                  {"1", "64", "2B", "7.6B", "14.4B", "128B", "1.3B", "6.2B"},
                                  {"2", "128", "4B", "15.2B", "28.8B", "256B", "2.5B", "12.5B"},
                                  {"4", "256", "8B", "30.4B", "57.6B", "0.5T", "5B", "25B"},
                                  {"8", "512", "16B", "60.8B", "115.2B", "1T", "10B", "50B"},
                                  {"16", "1024", "32B", "121.6B", "230.4B", "2T", "20B", "100B"},
                              });
}

TEST(Papers, InfinityMemoryAndBandwidth) {
  const auto tables = paper_tables("infinity");
  ASSERT_EQ(tables.size(), 3u);
  // The first MSWM is 1.56 by the formula where the paper prints 1.95.
  expect_rows(tables[0], {
                             {"0.10", "80", "10K", "128", "1.83", "2.03", "0.05", "1.56*", "1.63"},
                             {"0.50", "100", "20K", "160", "9.16", "3.91", "0.12", "6.25", "2.50"},
                             {"1.01", "128", "25K", "256", "18.31", "7.13", "0.20", "9.77", "3.56"},
                             {"10.05", "195", "64K", "512", "182.81", "24.38", "0.76", "64.00", "8.00"},
                             {"101.47", "315", "160K", "1024", "1845.70", "88.59", "3.08", "400.00", "18.00"},
                         });
  expect_rows(tables[1], {
                             {"parameters, gradients", "b 1", "1024", "70", "50.6 %"},
                             {"parameters, gradients", "b 1", "1024", "12", "14.9 %"},
                             {"parameters, gradients", "b 8", "8192", "12", "58.4 %"},
                             {"optimizer states", "b 2", "512", "1500", "91.6 %"},
                             {"activation checkpoints", "h 2K", "49152", "2", "58.4 %"},
                             {"activation checkpoints", "h 8K", "196608", "1", "73.7 %"},
                             {"activation checkpoints", "h 8K", "196608", "3", "89.4 %"},
                             {"optimizer states", "b 2", "512", "1230", "90 % needs it"},
                         });
  expect_rows(tables[2], {{"0.07", "3", "1.5", "70"}, {"0.7", "30", "15", "700"}, {"7", "300", "150", "7000"}});
}

TEST(Papers, Activations) {
  const auto tables = paper_tables("activations");
  ASSERT_EQ(tables.size(), 2u);
  expect_rows(tables[0], {
                             {"plain", "sbh(34 + 5as/h)", "1", "2.869", "275.4"},
                             {"tensor parallel", "sbh(10 + 24/t + 5as/(ht))", "8", "0.579", "55.6"},
                             {"+ sequence parallel", "sbh/t(34 + 5as/h)", "8", "0.359", "34.4"},
                             {"selective recompute", "34sbh/t", "1", "0.856", "82.1"},
                             {"full recompute", "2sbh", "1", "0.050", "4.83"},
                             {"full, split", "2sbh/t", "8", "0.006", "0.60"},
                         });
  ASSERT_FALSE(tables[0].notes.empty());
  EXPECT_EQ(tables[0].notes[0], "5as/h: 80 (a 96, s 2048, h 12288), 64 (a 128, s 2048, h 20480).");
  expect_rows(tables[1], {{"1.5B", "48", "1600", "32", "60.4", "5.03", "0.31"},
                          {"100B", "125", "8192", "32", "805.3", "67.1", "4.19"}});
  // The terms of a layer: attention 11sbh + 5as^2b, MLP 19sbh, two norms 4sbh.
  using namespace planning;
  const Transformer m{1, 64, 4, 32, 2};
  EXPECT_EQ(activation_bytes_of_layer(m, Keeping::All), 64 * 32 * 2 * (11 + 19 + 4) + 5 * 4 * 32 * 32 * 2);
}

// 2 bytes an element of a layer's input, kept once for so many layers (ZeRO, section 6.1).
TEST(Papers, CheckpointsOfSeveralLayers) {
  using namespace planning;
  const Transformer m{.layers = 12, .hidden = 64, .heads = 4, .sequence = 32, .batch = 2};
  EXPECT_EQ(checkpoint_bytes(m), 2.0 * 2 * 32 * 64 * 12);
  EXPECT_EQ(checkpoint_bytes(m, 3), 2.0 * 2 * 32 * 64 * 4);
}

TEST(Papers, Volumes) {
  const auto tables = paper_tables("volumes");
  ASSERT_EQ(tables.size(), 3u);
  expect_rows(tables[0], {
                             {"stage 0", "2f*S_r", "3,000,000", "3,000,000", "2"},
                             {"stage 1", "f*S_r + f*S_p", "3,000,000", "3,000,000", "2"},
                             {"stage 1, all-reduce", "2f*S_r + f*S_p", "4,500,000", "4,500,000", "3"},
                             {"stage 2", "k*f*S_r + f*S_p", "3,000,000", "7,500,000", "2"},
                             {"stage 2, summed locally", "f*S_r + f*S_p", "3,000,000", "3,000,000", "2"},
                             {"stage 3", "2k*f*S_p + k*f*S_r", "4,500,000", "18,000,000", "3"},
                             {"stage 3, kept after forward", "k*f*S_p + k*f*S_r", "3,000,000", "12,000,000", "2"},
                             {"stage 3, gathered once a step", "f*S_p + k*f*S_r", "3,000,000", "7,500,000", "2"},
                             {"stage 3, gradients kept whole", "2k*f*S_p + f*S_r", "4,500,000", "13,500,000", "3"},
                         });
  EXPECT_EQ(tables[0].notes.at(1), "Gradients of 4 bytes on the wire, stage 2, k = 1: 4,500,000. One rank: 0.");
  expect_rows(tables[1], {{"replicate", "2M(W-1)/W", "1.996"},
                          {"full shard", "3M(W-1)/W", "2.994"},
                          {"hybrid (paper)", "2M(W-1)/(GW)", "0.250"},
                          {"hybrid (ring)", "2M(W-G)/(GW)", "0.246"}});
  expect_rows(tables[2], {{"ZeRO-3", "1M", "1M", "1M", "3M"},
                          {"qwZ", "0.5M", "0.5M", "1M", "2M"},
                          {"+ hpZ", "0.5M", "0", "1M", "1.5M"},
                          {"+ qgZ", "0.5M", "0", "0.25M", "0.75M"}});
  EXPECT_EQ(tables[2].notes.at(0), "With a scale for every 256 elements: 0.508 and 0.258.");
  EXPECT_EQ(tables[2].notes.at(1),
            "Second shards (hpZ), 100B on 1024 GPUs, 16 a host: 1.5625 -> 14.0625 GB, 9.0x, 1/114 of a replica.");
}

TEST(Papers, Examples) {
  const auto table = only("examples");
  std::multimap<std::string, std::string> values;
  for (const auto& row : table.rows) values.emplace(row.at(0), row.at(2));
  const std::multimap<std::string, std::string> expected = {
      {"1e9 parameters, fp32", "4 GB"},
      {"1e9 parameters, 16-bit", "2 GB"},
      {"1e9 parameters, int8", "1 GB"},
      {"1e9 parameters, states in training", "16 GB"},
      {"the same, fp32 Adam", "16 GB"},
      {"rule of thumb: all of training", "80 GB"},
      {"optimizer states, of weights", "2x"},
      {"optimizer states, of weights", "6x"},
      {"saved by stage 1, N 4", "2.286x"},
      {"saved by stage 2, N 4", "2.909x"},
      {"saved by stage 3, N 4", "4x"},
      {"saved by stage 1, N 8", "2.909x"},
      {"saved by stage 2, N 8", "4.267x"},
      {"saved by stage 3, N 8", "8x"},
      {"saved by stage 1, N 64", "3.821x"},
      {"saved by stage 2, N 64", "7.211x"},
      {"saved by stage 3, N 64", "64x"},
      {"limit of stage 1", "4x"},
      {"limit of stage 2", "8x"},
      {"GPT-2 1.5B, 16-bit weights", "3 GB"},
      {"GPT-2 1.5B, states", "24 GB"},
      {"GPT-2 small, parameters", "124,439,808"},
      {"GPT-2 small, shard of 4", "31,109,952"},
      {"stage 1, before the optimizer", "0.348 GiB"},
      {"stage 1, with the optimizer", "0.579 GiB"},
      {"12 masks of 1024 x 1024 bytes", "0.0117 GiB"},
      {"before, with buffers", "0.359 GiB"},
      {"with the optimizer and buffers", "0.591 GiB"},
      {"512 x 512 and 512 x 1, fp32", "1,050,624 B"},
      {"the same", "1.001953125 MiB"},
      {"with a 16-bit copy", "1.5029296875 MiB"},
  };
  EXPECT_EQ(values, expected);
}

TEST(Papers, DeepSpeedsEstimator) {
  expect_rows(only("estimator"), {
                                     {"ZeRO-2, as documented", "8", "15.93", "127.45"},
                                     {"ZeRO-2", "8", "11.28", "127.45"},
                                     {"ZeRO-2, optimizer offloaded", "8", "5.31", "127.45"},
                                     {"ZeRO-3", "8", "6.09", "127.45"},
                                     {"ZeRO-3, optimizer offloaded", "8", "0.78", "127.45"},
                                     {"ZeRO-3, optimizer offloaded", "1", "5.43", "63.72"},
                                     {"ZeRO-3, both offloaded", "8", "0.12", "71.69"},
                                 });
}

TEST(Papers, BytesOfEveryRecipeAndStage) {
  using namespace planning;
  const struct {
    StateWidths widths;
    double at_4[4];  // bytes a parameter, N = 4
  } rows[] = {
      {kMixedAdam, {16, 7, 5.5, 4}}, {kMixedAdamFp32Gradients, {18, 9, 6, 4.5}},
      {kInfinity, {20, 8, 6.5, 5}},  {{2, 2, 4}, {8, 5, 3.5, 2}},
      {{2, 2, 8}, {12, 6, 4.5, 3}},  {kFp32Adam, {16, 10, 7, 4}},
      {{4, 4, 0}, {8, 8, 5, 2}},     {{4, 4, 4}, {12, 9, 6, 3}},
  };
  for (const auto& [widths, expected] : rows)
    for (int stage = 0; stage <= 3; ++stage) EXPECT_DOUBLE_EQ(state_bytes(widths, stage, 1, 4), expected[stage]);
}

TEST(Papers, UnknownNamesAreRefused) {
  EXPECT_EQ(paper_names(), (std::vector<std::string>{"table1", "table2", "infinity", "activations", "volumes",
                                                     "examples", "estimator"}));
  try {
    paper_tables("table3");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("\"table3\", expected one of table1, table2"), std::string::npos)
        << error.what();
  }
}

// As published with the weights (Hugging Face model cards; GPT-3: its formula with biases, table 2.1 says 175.0B).
TEST(Models, HaveThePublishedNumbersOfParameters) {
  const std::map<std::string, std::int64_t> published = {
      {"gpt2", 124439808},
      {"gpt2-medium", 354823168},
      {"gpt2-large", 774030080},
      {"gpt2-xl", 1557611200},
      {"gpt3-175b", 174604259328},
      {"bert-base", 109482240},
      {"bert-large", 335141888},
      {"t5-small", 60506624},
      {"t5-base", 222903552},
      {"t5-large", 737668096},
      {"t5-3b", 2851598336},
      {"t5-11b", 11307321344},
      {"llama-3.2-1b", 1235814400},
      {"llama-3.2-3b", 3212749824},
      {"llama-2-7b", 6738415616},
      {"llama-3-8b", 8030261248},
      {"llama-2-13b", 13015864320},
      {"llama-2-70b", 68976648192},
      {"llama-3-70b", 70553706496},
      {"llama-3.1-405b", 405853388800},
      {"gpt-1m", 1 * 256 * 144 + 128 * 144 + 4 * (12 * 144 * 144 + 13 * 144) + 2 * 144},
      {"gpt-10m", 256 * 368 + 256 * 368 + 6 * (12 * 368 * 368 + 13 * 368) + 2 * 368},
  };
  EXPECT_EQ(PlanModel::names().size(), published.size());
  for (const auto& name : PlanModel::names()) {
    const auto model = PlanModel::named(name);
    ASSERT_EQ(published.count(name), 1u) << name;
    EXPECT_EQ(model.num_parameters(), published.at(name)) << name;
    EXPECT_NO_THROW(model.validate());
  }
}

TEST(Models, NamesAreForgivingAndMistakesAreAnswered) {
  EXPECT_EQ(PlanModel::named("GPT2-XL").layers, 48);
  EXPECT_EQ(PlanModel::named("gpt-2-medium").hidden, 1024);
  EXPECT_EQ(PlanModel::named("llama_3_8b").kv_heads, 8);
  try {
    PlanModel::named("lama-3-8b");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean \"llama-3-8b\"?"), std::string::npos) << error.what();
  }
  EXPECT_THROW(PlanModel::of_count(12), ConfigError);
  auto odd = PlanModel::named("gpt2");
  odd.heads = 7;
  EXPECT_THROW(odd.validate(), ConfigError);
}

TEST(Models, ANumberOfParametersIsKeptExactly) {
  for (const double parameters : {1e6, 124439808.0, 1.5e9, 7.5e9, 175e9, 1e12, 1.0147e14}) {
    const auto model = PlanModel::of_count(parameters);
    EXPECT_EQ(static_cast<double>(model.num_parameters()), parameters);
    const auto shape = static_cast<double>(12 * model.layers * model.hidden * model.hidden +
                                           (model.vocabulary + model.sequence) * model.hidden);
    if (parameters > 1e8) {
      EXPECT_NEAR(shape / parameters, 1, 0.1) << parameters;
    }
  }
}

TEST(Units, OfAShapeAreTheRootAndTheLayersPaddedToEqualShards) {
  auto model = PlanModel::named("gpt-1m");
  const Options options;
  const auto parameters = planning::parameters_of(model);
  const auto units = planning::cut_into_units(parameters, options.settings(), 3, 2, /*gpu=*/false);
  ASSERT_EQ(units.size(), 5u);
  EXPECT_EQ(units[0].name, "root");
  EXPECT_TRUE(units[0].root);
  EXPECT_EQ(units[1].name, "blocks.0");
  std::int64_t sum = 0;
  for (const auto& unit : units) {
    sum += unit.numel();
    EXPECT_EQ(unit.padded_numel(), 3 * unit.shard_numel());
    EXPECT_EQ(unit.shard_numel() % 32, 0);
    EXPECT_LT(unit.padded_numel() - unit.numel(), 32 * static_cast<std::int64_t>(unit.parameters.size() + 3));
  }
  EXPECT_EQ(sum, model.num_parameters());
  EXPECT_EQ(planning::reduce_order(units), (std::vector<std::size_t>{4, 3, 2, 1, 0}));
}

}  // namespace
}  // namespace zero::plan_papers_test
