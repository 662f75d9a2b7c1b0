// `zero bench` as a user starts it: the tables, the document, and the refusals.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <map>

#include "cli/process.h"

namespace {

using nlohmann::json;
using zero::test::Process;

const std::string kZero = std::string(ZERO_BINARY_DIR) + "/bin/zero";
const std::vector<std::string> kSmall = {"--layers", "2", "--hidden", "32", "--heads", "2", "--sequence", "16", "--micro-batch-size", "2", "--iterations", "3"};

struct Outcome {
  int code;
  std::string out, err;
};

Outcome bench(std::vector<std::string> words, bool small = true) {
  std::vector<std::string> arguments{kZero, "bench"};
  arguments.insert(arguments.end(), words.begin(), words.end());
  if (small) arguments.insert(arguments.end(), kSmall.begin(), kSmall.end());
  Process process({arguments, {"COLUMNS=100", "OMP_NUM_THREADS=1", "RANK", "WORLD_SIZE"}, {}, -1});
  const int code = process.wait(120);
  return {code, process.out, process.err};
}

TEST(BenchStages, TheDocumentAgreesWithWhatZeroPromises) {
  const auto run = bench({"stages", "--world", "2", "--json"});
  ASSERT_EQ(run.code, 0) << run.err;
  const auto document = json::parse(run.out);
  EXPECT_EQ(document["schema"], "zero.bench.stages/1");
  EXPECT_EQ(document["world"], 2);
  ASSERT_EQ(document["runs"].size(), 12u);
  const auto elements = document["model"]["parameters_elements"].get<double>();
  std::map<std::string, std::map<int, json>> runs;
  for (const auto& one : document["runs"]) runs[one["recipe"]][one["stage"]] = one;
  for (const std::string recipe : {"fp32", "bf16", "fp16"}) {
    SCOPED_TRACE(recipe);
    ASSERT_EQ(runs[recipe].size(), 4u);
    EXPECT_EQ(document["equal_state"][recipe], true);
    const auto rest = [&](int stage, const char* what) { return runs[recipe][stage]["memory"]["before_forward"][what].get<double>(); };
    for (int stage = 0; stage <= 3; ++stage) {
      EXPECT_EQ(runs[recipe][stage]["state_hash"], runs[recipe][0]["state_hash"]) << stage;
      EXPECT_EQ(runs[recipe][stage]["last_loss"], runs[recipe][0]["last_loss"]) << stage;
      EXPECT_GT(runs[recipe][stage]["total_s"].get<double>(), 0);
      EXPECT_GT(runs[recipe][stage]["bytes_sent_per_step"].get<double>(), 0);
      // Parameters whole below stage 3, else half, but for padding.
      const double width = recipe == "fp32" ? 4 : 2;
      EXPECT_NEAR(rest(stage, "parameters_bytes") / (elements * width), stage == 3 ? 0.5 : 1, 0.02) << stage;
      const double states = recipe == "fp32" ? 8 : 12;  // with fp32 the parameter is its own master
      EXPECT_NEAR(rest(stage, "master_and_optimizer_states_bytes") / (elements * states), stage == 0 ? 1 : 0.5, 0.02) << stage;
      const auto& memory = runs[recipe][stage]["memory"];
      EXPECT_GT(memory["after_forward"]["activations_bytes"], memory["after_step"]["activations_bytes"]) << stage;
      EXPECT_GE(memory["after_backward"]["peak_bytes"], memory["after_backward"]["total_bytes"]);
    }
    // Stage 2 keeps the gradients of its shard only.
    const auto gradients = [&](int stage) { return runs[recipe][stage]["memory"]["after_backward"]["gradients_bytes"].get<double>(); };
    EXPECT_NEAR(gradients(2) / gradients(1), 0.5, 0.02);
    EXPECT_EQ(gradients(3), gradients(2));
  }
  EXPECT_NE(runs["fp32"][0]["state_hash"], runs["bf16"][0]["state_hash"]);
}

TEST(BenchStages, TablesForPeople) {
  const auto run = bench({"stages", "--stages", "0,3", "--recipes", "bf16"});
  ASSERT_EQ(run.code, 0) << run.err;
  for (const char* text : {"bf16, stage 0: memory of rank 0", "bf16, stage 3: memory of rank 0", "before forward", "after backward",
                           "master + optimizer", "bf16: memory of rank 0 by stage", "median ms", "state hash equal at all stages: "})
    EXPECT_NE(run.out.find(text), std::string::npos) << text << "\n" << run.out;
  EXPECT_NE(run.err.find("zero bench stages: bf16, stage 3: 3 steps"), std::string::npos) << run.err;
  for (const auto& line : zero::test::lines(run.out)) EXPECT_LE(line.size(), 100u) << line;
  EXPECT_EQ(bench({"stages", "--stages", "0", "--recipes", "fp32", "--quiet"}).err, "");
}

TEST(BenchStages, KeysOfTheConfigurationCanBeSet) {
  // One step in sixteen-bit on the wire: half the bytes.
  const auto sent = [](const std::vector<std::string>& more) {
    std::vector<std::string> words{"stages", "--stages", "2", "--recipes", "fp32", "--json"};
    words.insert(words.end(), more.begin(), more.end());
    const auto run = bench(words);
    EXPECT_EQ(run.code, 0) << run.err;
    return json::parse(run.out)["runs"][0]["by_op"]["reduce_scatter"]["bytes_sent_per_step"].get<double>();
  };
  EXPECT_EQ(sent({"--set", "communication_data_type=bf16"}) * 2, sent({}));
}

TEST(BenchStages, FaultsBeforeAnythingRuns) {
  const auto refused = [](const std::vector<std::string>& words, const std::string& text) {
    const auto run = bench(words, false);
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_NE(run.err.find(text), std::string::npos) << run.err;
    EXPECT_EQ(run.out, "");
  };
  refused({"stages", "--recipes", "fp32,fp8"}, "[--recipes] got \"fp32,fp8\", expected some of fp32, bf16, fp16");
  refused({"stages", "--stages", "1,1"}, "[--stages] got \"1,1\"");
  refused({"stages", "--model", "gpt3"}, "got \"gpt3\"");
  refused({"stages", "--hidden", "30"}, "heads");
  refused({"stages", "--set", "zero_optimization.stage=2"}, "use --stages");
  refused({"stages", "--set", "no_such_key=1"}, "no_such_key");
  refused({"stages", "--iteration", "3"}, "did you mean --iterations");
  refused({"io"}, "[zero bench] got io, which is not available in this version, expected stages");
  refused({"collectives"}, "not available in this version");
  refused({"stage"}, "did you mean stages");
  refused({}, "expected stages");
}

TEST(Bench, Help) {
  EXPECT_NE(bench({"--help"}, false).out.find("zero bench NAME"), std::string::npos);
  const auto help = bench({"stages", "--help"}, false);
  EXPECT_EQ(help.code, 0);
  for (const auto& line : zero::test::lines(help.out)) EXPECT_LE(line.size(), 80u) << line;
}

TEST(BenchStages, UnderALauncherItUsesTheRanks) {
  std::vector<std::string> arguments{kZero, "run", "-n", "2", "--no-prefix", "--", kZero, "bench", "stages", "--recipes", "fp32", "--stages", "0,3", "--json"};
  arguments.insert(arguments.end(), kSmall.begin(), kSmall.end());
  Process process({arguments, {"OMP_NUM_THREADS=1", "RANK", "WORLD_SIZE"}, {}, -1});
  ASSERT_EQ(process.wait(120), 0) << process.err;
  const auto document = json::parse(process.out);
  EXPECT_EQ(document["world"], 2);
  EXPECT_NE(document["transport"], "thread");
  EXPECT_EQ(document["equal_state"]["fp32"], true);
}

}  // namespace
