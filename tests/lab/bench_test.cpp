// `zero bench` as a user runs it: the tables, the document, and invalid options.
#include <gtest/gtest.h>

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "support/process.h"

namespace bench_test {
namespace {

using nlohmann::json;
using zero::test::Ended;
using zero::test::Process;
using zero::test::run_to_end;

const std::string kZero = std::string(ZERO_BINARY_DIR) + "/bin/zero";
const std::vector<std::string> kSmall = {"--layers",   "2",  "--hidden",           "32", "--heads",      "2",
                                         "--sequence", "16", "--micro-batch-size", "2",  "--iterations", "3"};

Ended bench(std::vector<std::string> words, bool small = true) {
  std::vector<std::string> arguments{kZero, "bench"};
  arguments.insert(arguments.end(), words.begin(), words.end());
  if (small) arguments.insert(arguments.end(), kSmall.begin(), kSmall.end());
  return run_to_end({arguments, {"COLUMNS=100", "OMP_NUM_THREADS=1", "RANK", "WORLD_SIZE"}, {}, -1}, 120);
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
    const auto rest = [&](int stage, const char* what) {
      return runs[recipe][stage]["memory"]["before_forward"][what].get<double>();
    };
    for (int stage = 0; stage <= 3; ++stage) {
      EXPECT_EQ(runs[recipe][stage]["state_hash"], runs[recipe][0]["state_hash"]) << stage;
      EXPECT_EQ(runs[recipe][stage]["last_loss"], runs[recipe][0]["last_loss"]) << stage;
      const json& times = runs[recipe][stage]["step_s"];
      EXPECT_LE(times["p10"].get<double>(), times["median"].get<double>());
      EXPECT_LE(times["median"].get<double>(), times["p90"].get<double>());
      EXPECT_GE(runs[recipe][stage]["total_s"].get<double>(), times["median"].get<double>()) << "of all steps";
      EXPECT_GT(runs[recipe][stage]["bytes_sent_per_step"].get<double>(), 0);
      // Parameters are replicated below stage 3 and half at stage 3, except for padding.
      const double width = recipe == "fp32" ? 4 : 2;
      EXPECT_NEAR(rest(stage, "parameters_bytes") / (elements * width), stage == 3 ? 0.5 : 1, 0.02) << stage;
      const double states = recipe == "fp32" ? 8 : 12;  // with fp32 the parameter is its own master
      EXPECT_NEAR(rest(stage, "master_and_optimizer_states_bytes") / (elements * states), stage == 0 ? 1 : 0.5, 0.02)
          << stage;
      const auto& memory = runs[recipe][stage]["memory"];
      EXPECT_GT(memory["after_forward"]["activations_bytes"], memory["after_step"]["activations_bytes"]) << stage;
      EXPECT_GE(memory["after_backward"]["peak_bytes"], memory["after_backward"]["total_bytes"]);
    }
    // Stage 2 keeps the gradients of its shard only.
    const auto gradients = [&](int stage) {
      return runs[recipe][stage]["memory"]["after_backward"]["gradients_bytes"].get<double>();
    };
    EXPECT_NEAR(gradients(2) / gradients(1), 0.5, 0.02);
    EXPECT_EQ(gradients(3), gradients(2));
  }
  EXPECT_NE(runs["fp32"][0]["state_hash"], runs["bf16"][0]["state_hash"]);
}

TEST(BenchStages, TablesForPeople) {
  const auto run = bench({"stages", "--stages", "0,3", "--recipes", "bf16"});
  ASSERT_EQ(run.code, 0) << run.err;
  for (const char* text :
       {"bf16, stage 0: memory of rank 0", "bf16, stage 3: memory of rank 0", "before forward", "after backward",
        "master + optimizer", "bf16: memory of rank 0 by stage", "median ms", "state hash equal at all stages: "})
    EXPECT_NE(run.out.find(text), std::string::npos) << text << "\n" << run.out;
  EXPECT_NE(run.err.find("zero bench stages: bf16, stage 3: 3 steps"), std::string::npos) << run.err;
  for (const auto& line : zero::test::lines(run.out)) EXPECT_LE(line.size(), 100u) << line;
  EXPECT_EQ(bench({"stages", "--stages", "0", "--recipes", "fp32", "--quiet"}).err, "");
}

TEST(BenchStages, KeysOfTheConfigurationCanBeSet) {
  // One step with 16-bit reductions: half the bytes.
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
  refused({"stage"}, "did you mean stages");
  refused({}, "expected one of stages, step, experts, collectives");
}

Ended bench_step(std::vector<std::string> words) {
  const std::vector<std::string> tiny = {"step", "--layers",   "2",  "--hidden",     "32", "--heads",
                                         "2",    "--sequence", "16", "--vocabulary", "64", "--rounds",
                                         "2",    "--steps",    "3",  "--warmup",     "1"};
  words.insert(words.begin(), tiny.begin(), tiny.end());
  return bench(words, false);
}

TEST(BenchStep, RanksAreProcessesAndTheDocumentIsConsistent) {
  const auto run = bench_step({"--stages", "0,3", "--recipes", "fp32,bf16", "--json"});
  ASSERT_EQ(run.code, 0) << run.err;
  const auto document = json::parse(run.out);
  EXPECT_EQ(document["schema"], "zero.bench.step/1");
  EXPECT_EQ(document["world"], 2);
  EXPECT_EQ(document["transport"], "shm");
  EXPECT_GT(document["machine"]["memory_bytes"].get<double>(), 0);
  EXPECT_EQ(document["equal_losses"], json({{"fp32", true}, {"bf16", true}}));
  ASSERT_EQ(document["runs"].size(), 4u);
  ASSERT_EQ(document["compute"].size(), 2u);
  const auto elements = document["model"]["parameters_elements"].get<double>();
  std::map<std::string, std::map<int, json>> runs;
  for (const auto& one : document["runs"]) {
    runs[one["recipe"]][one["stage"]] = one;
    const auto& samples = one["samples"];
    ASSERT_EQ(samples["step_s"].size(), 6u);
    ASSERT_EQ(one["round_medians_s"].size(), 2u);
    for (std::size_t i = 0; i < 6; ++i)
      EXPECT_NEAR(samples["step_s"][i].get<double>(),
                  samples["forward_s"][i].get<double>() + samples["backward_s"][i].get<double>() +
                      samples["optimizer_s"][i].get<double>(),
                  1e-6);
    EXPECT_LE(one["step_s"]["min"], one["step_s"]["median"]);
    EXPECT_LE(one["step_s"]["median"], one["step_s"]["p99"]);
    EXPECT_EQ(one["peak_pss_bytes"]["by_rank"].size(), 2u);
    // A rank holds at least a sixteenth of all states, whatever the stage, and less than a gigabyte here.
    EXPECT_GT(one["peak_pss_bytes"]["highest"].get<double>(), elements);
    EXPECT_LT(one["peak_pss_bytes"]["highest"].get<double>(), 1e9);
  }
  for (const auto& floor : document["compute"]) {
    EXPECT_EQ(floor["samples"]["adamw_s"].size(), 6u);
    const double expected = floor["step_s"]["median"].get<double>() + floor["adamw_share_s"]["median"].get<double>();
    EXPECT_DOUBLE_EQ(floor["floor_s"].get<double>(), expected);
    for (auto& [stage, one] : runs[floor["recipe"]])
      EXPECT_DOUBLE_EQ(one["step_over_floor"].get<double>(), one["step_s"]["median"].get<double>() / expected) << stage;
  }
  for (auto& [recipe, by_stage] : runs) {
    SCOPED_TRACE(recipe);
    EXPECT_EQ(by_stage[0]["last_loss"], by_stage[3]["last_loss"]);
    // With two ranks: all-reduce of all gradients; stage 3 gathers the parameters twice and reduces once.
    const double width = recipe == "fp32" ? 4 : 2;
    EXPECT_NEAR(by_stage[0]["bytes_sent_per_step"].get<double>() / (elements * width), 1, 0.02);
    EXPECT_NEAR(by_stage[3]["bytes_sent_per_step"].get<double>() / (elements * width), 1.5, 0.1);
  }
}

TEST(BenchStep, TableAndProgress) {
  const auto run = bench_step({"--stages", "2", "--recipes", "fp16", "--transport", "gloo", "--rounds=1"});
  EXPECT_EQ(run.code, 2) << "given twice";
  const auto good = bench_step({"--stages", "2", "--recipes", "fp16", "--transport", "gloo"});
  ASSERT_EQ(good.code, 0) << good.err;
  for (const char* text : {"2 ranks (gloo), threads a rank 1; 2 rounds of 3 steps after 1", "stage 2", "compute",
                           "+ AdamW share", "losses equal in all stages and rounds"})
    EXPECT_NE(good.out.find(text), std::string::npos) << text << "\n" << good.out;
  EXPECT_NE(good.err.find("zero bench step: round 2 of 2: fp16, stage 2: "), std::string::npos) << good.err;
  for (const auto& line : zero::test::lines(good.out)) EXPECT_LE(line.size(), 100u) << line;
  const auto bare = bench_step({"--stages", "1", "--recipes", "fp32", "--no-compute", "--quiet"});
  EXPECT_EQ(bare.err, "");
  EXPECT_EQ(bare.out.find("compute"), std::string::npos) << bare.out;
}

TEST(BenchStep, ARankThatDiesEndsTheCommandAndIsNamed) {
  const std::string mark = "BENCH_TEST_MARK=" + std::to_string(getpid());
  Process process({{kZero, "bench", "step", "--layers", "1", "--hidden", "16", "--heads", "2", "--stages", "1",
                    "--steps", "1000000", "--no-compute", "--json"},
                   {"OMP_NUM_THREADS=1", "RANK", "WORLD_SIZE", mark},
                   {},
                   -1});
  std::vector<pid_t> ranks;
  for (int k = 0; k < 600 && ranks.empty(); ++k) {
    usleep(100000);
    const auto ours = zero::test::with_environment(mark), ones = zero::test::with_environment("RANK=1");
    for (const pid_t pid : ones)
      if (std::find(ours.begin(), ours.end(), pid) != ours.end()) ranks.push_back(pid);
  }
  ASSERT_EQ(ranks.size(), 1u) << process.err;
  kill(ranks[0], SIGKILL);
  EXPECT_EQ(process.wait(60), 6) << process.err;
  EXPECT_NE(process.err.find("rank 1 of 2"), std::string::npos) << process.err;
  EXPECT_NE(process.err.find("SIGKILL"), std::string::npos) << process.err;
  EXPECT_EQ(process.out, "");
  EXPECT_TRUE(zero::test::left_behind(mark).empty());
}

TEST(BenchStep, ARankIsNotStartedByHand) {
  const auto run = run_to_end({{ZERO_BINARY_DIR "/bin/zero-lab", "step-rank", "{}"}, {}, "", -1});
  EXPECT_EQ(run.code, 2);
  EXPECT_NE(run.err.find("got a start by hand"), std::string::npos) << run.err;
}

// The model that script/compare measures next to transformers': a Llama of `zero models`, with its parameters, the same
// losses at all stages, and a first loss near that of equal probabilities.
TEST(BenchStep, ALlamaByItsName) {
  const auto run = bench({"step", "--model", "llama-15m", "--no-compute", "--stages", "0,3", "--recipes", "fp32",
                          "--steps", "1", "--warmup", "0", "--rounds", "1", "--sequence", "16", "--json"},
                         false);
  ASSERT_EQ(run.code, 0) << run.err;
  const auto document = json::parse(run.out);
  // 32000 x 288 embeddings, 6 layers of 4 x 288^2 + 3 x 288 x 768 + 2 x 288, the last norm.
  EXPECT_EQ(document["model"]["parameters_elements"],
            32000 * 288 + 6 * (4 * 288 * 288 + 3 * 288 * 768 + 2 * 288) + 288);
  EXPECT_EQ(document["equal_losses"]["fp32"], true);
  EXPECT_NEAR(document["runs"][0]["first_loss"].get<double>(), std::log(32000), 0.2);
  const auto cut = bench({"step", "--model", "llama-15m", "--no-compute", "--layers", "2"}, false);
  EXPECT_EQ(cut.code, 2);
  EXPECT_NE(cut.err.find("[--layers]"), std::string::npos) << cut.err;
}

TEST(BenchStep, FaultsBeforeAnythingRuns) {
  const auto refused = [](const std::vector<std::string>& words, const std::string& text) {
    const auto run = bench_step(words);
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_NE(run.err.find(text), std::string::npos) << run.err;
    EXPECT_EQ(run.out, "");
  };
  refused({"--recipes", "fp8"}, "[--recipes] got \"fp8\"");
  refused({"--stages", "4"}, "[--stages] got \"4\"");
  refused({"--transport", "thread"}, "[--transport] got \"thread\"");
  refused({"--set", "no_such_key=1"}, "no_such_key");
  refused({"--set", "bf16.enabled=true"}, "use --stages, --recipes");
}

TEST(BenchStep, UnderALauncherItUsesTheRanks) {
  std::vector<std::string> arguments{
      kZero,      "run",     "-n",       "2",         "--no-prefix", "--",       kZero,          "bench", "step",
      "--layers", "1",       "--hidden", "16",        "--heads",     "2",        "--vocabulary", "32",    "--rounds",
      "1",        "--steps", "2",        "--recipes", "bf16",        "--stages", "1,3",          "--json"};
  Process process({arguments, {"OMP_NUM_THREADS=1", "RANK", "WORLD_SIZE"}, {}, -1});
  ASSERT_EQ(process.wait(120), 0) << process.err;
  const auto document = json::parse(process.out);
  EXPECT_EQ(document["transport"], "shm");
  EXPECT_EQ(document["equal_losses"]["bf16"], true);
  EXPECT_EQ(document["runs"].size(), 2u);
}

TEST(BenchCollectives, AllRowsOfAllTransports) {
  const auto run = bench(
      {"collectives", "--smallest", "65536", "--largest", "1048576", "--rounds", "1", "--dtype", "bf16", "--json"},
      false);
  ASSERT_EQ(run.code, 0) << run.err;
  const auto document = json::parse(run.out);
  EXPECT_EQ(document["schema"], "zero.bench.collectives/1");
  EXPECT_EQ(document["dtype"], "bf16");
  EXPECT_EQ(document["world"], 2);
  std::map<std::string, int> rows;
  for (const auto& one : document["runs"]) {
    rows[one["operation"].get<std::string>() +
         (one["transport"].is_null() ? "" : "/" + one["transport"].get<std::string>())]++;
    const auto& time = one["time_s"];
    EXPECT_GT(time["min"], 0);
    EXPECT_LE(time["min"], time["median"]);
    EXPECT_LE(time["median"], time["p99"]);
    EXPECT_DOUBLE_EQ(one["bytes_per_s"].get<double>(), one["bytes"].get<double>() / time["median"].get<double>());
  }
  const std::map<std::string, int> expected{{"memcpy", 3},
                                            {"reduce_scatter/shm", 3},
                                            {"reduce_scatter/gloo", 3},
                                            {"all_gather/shm", 3},
                                            {"all_gather/gloo", 3},
                                            {"all_reduce/shm", 3},
                                            {"all_reduce/gloo", 3},
                                            {"reduce_scatter/gloo_library", 3},
                                            {"all_gather/gloo_library", 3},
                                            {"all_reduce/gloo_library", 3}};
  EXPECT_EQ(rows, expected);
  EXPECT_EQ(document["ratios"].size(), 9u);
  EXPECT_TRUE(document["ratios"][0].contains("shm_time_over_gloo"));
  EXPECT_TRUE(document["ratios"][0].contains("shm_time_over_gloo_library"));
}

TEST(BenchCollectives, TableAndRefusals) {
  const auto run = bench({"collectives", "--operations", "all_gather", "--transports", "shm", "--largest", "65536",
                          "--rounds", "2", "--world", "3"},
                         false);
  ASSERT_EQ(run.code, 0) << run.err;
  for (const char* text : {"3 ranks, fp32", "all_gather\n", "64.0KiB", "shm ms", "memcpy GB/s", "all results exact"})
    EXPECT_NE(run.out.find(text), std::string::npos) << text << "\n" << run.out;
  EXPECT_EQ(run.out.find("gloo"), std::string::npos) << run.out;
  const auto refused = [](const std::vector<std::string>& words, const std::string& text) {
    const auto bad = bench(words, false);
    EXPECT_EQ(bad.code, 2) << bad.err;
    EXPECT_NE(bad.err.find(text), std::string::npos) << bad.err;
  };
  refused({"collectives", "--operations", "gather"}, "[--operations] got \"gather\"");
  refused({"collectives", "--transports", "thread"}, "[--transports] got \"thread\"");
  refused({"collectives", "--smallest", "1024", "--largest", "512"}, "[--largest] got 512");
}

TEST(BenchOptimizer, EveryRuleAndJobIsCheckedAndTheDocumentIsConsistent) {
  // More than one period of the values and an odd rest; 2 threads share from about a million elements on.
  const auto run = bench({"optimizer", "--elements", "1.2e6", "--threads", "2,1", "--jobs", "fp32,bf16,fp16", "--rules",
                          "adamw,adam,sgd,adagrad,lion", "--iterations", "3", "--warmup", "1", "--json", "--quiet"},
                         false);
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(run.err, "");
  const auto document = json::parse(run.out);
  EXPECT_EQ(document["schema"], "zero.bench.optimizer/1");
  EXPECT_EQ(document["elements"], 1200000);
  EXPECT_EQ(document["verified"], "every element, every bit");
  EXPECT_GT(document["machine"]["memory_bytes"].get<double>(), 0);
  ASSERT_EQ(document["runs"].size(), 5u * 3 * 2);
  std::map<std::string, int> bytes;
  for (const auto& one : document["runs"]) {
    bytes[one["rule"].get<std::string>() + "/" + one["job"].get<std::string>()] = one["bytes_per_element"];
    const auto& time = one["time_s"];
    EXPECT_GT(time["min"], 0);
    EXPECT_LE(time["min"], time["median"]);
    EXPECT_LE(time["median"], time["p99"]);
    EXPECT_EQ(one["samples_s"].size(), 3u);
    EXPECT_DOUBLE_EQ(one["elements_per_s"].get<double>(), 1.2e6 / time["median"].get<double>());
    EXPECT_DOUBLE_EQ(one["bytes_per_s"].get<double>(),
                     one["elements_per_s"].get<double>() * one["bytes_per_element"].get<double>());
    EXPECT_DOUBLE_EQ(one["bytes_per_s_over_triad"].get<double>(),
                     one["bytes_per_s"].get<double>() / one["triad_bytes_per_s"].get<double>());
  }
  EXPECT_EQ(document["runs"][0]["threads"], 2);
  EXPECT_EQ(document["runs"][1]["threads"], 1);
  const std::map<std::string, int> expected{
      {"adamw/fp32", 28},   {"adamw/bf16", 28},   {"adamw/fp16", 28}, {"adam/fp32", 28}, {"adam/bf16", 28},
      {"adam/fp16", 28},    {"sgd/fp32", 20},     {"sgd/bf16", 20},   {"sgd/fp16", 20},  {"adagrad/fp32", 20},
      {"adagrad/bf16", 20}, {"adagrad/fp16", 20}, {"lion/fp32", 20},  {"lion/bf16", 20}, {"lion/fp16", 20}};
  EXPECT_EQ(bytes, expected);
}

TEST(BenchOptimizer, TableAndProgress) {
  const auto run =
      bench({"optimizer", "--elements", "1000", "--threads", "1", "--iterations", "2", "--jobs", "bf16"}, false);
  ASSERT_EQ(run.code, 0) << run.err;
  for (const char* text : {"1.00k parameters in one flat tensor; 2 updates after 2", "median ms", "triad GB/s",
                           "adamw  bf16", "all elements have the bits of a scalar reference\n"})
    EXPECT_NE(run.out.find(text), std::string::npos) << text << "\n" << run.out;
  EXPECT_EQ(run.out.find("fp32"), std::string::npos) << run.out;
  EXPECT_EQ(run.err, "zero bench optimizer: adamw, bf16\n");
  for (const auto& line : zero::test::lines(run.out)) EXPECT_LE(line.size(), 100u) << line;
}

TEST(BenchOptimizer, FaultsBeforeAnythingRuns) {
  const auto refused = [](const std::vector<std::string>& words, const std::string& text) {
    std::vector<std::string> all{"optimizer"};
    all.insert(all.end(), words.begin(), words.end());
    const auto run = bench(all, false);
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_NE(run.err.find(text), std::string::npos) << run.err;
    EXPECT_EQ(run.out, "");
  };
  refused({"--rules", "adamw,adamx"},
          "[--rules] got \"adamw,adamx\", expected some of adamw, adam, sgd, adagrad, lion");
  refused({"--jobs", "fp8"}, "[--jobs] got \"fp8\"");
  for (const char* threads : {"0", "1,1", "2,", ",2", "two", "1 2", "2000"})
    refused({"--threads", threads}, std::string("[--threads] got \"") + threads + "\"");
  refused({"--elements", "1.5"}, "[--elements] got 1.500, expected a whole number");
  refused({"--elements", "0"}, "--elements");
  refused({"--elements", "1e12"}, "of memory that are free. Hint: --elements ");
  refused({"--iterations", "0"}, "--iterations");
  refused({"--element", "10"}, "did you mean --elements");
}

TEST(Bench, Help) {
  EXPECT_NE(bench({"--help"}, false).out.find("zero bench NAME"), std::string::npos);
  for (const char* name : {"stages", "step", "collectives", "optimizer"}) {
    const auto help = bench({name, "--help"}, false);
    EXPECT_EQ(help.code, 0);
    EXPECT_NE(help.out.find("Example"), std::string::npos) << help.out;
    for (const auto& line : zero::test::lines(help.out)) EXPECT_LE(line.size(), 80u) << line;
  }
}

TEST(BenchStages, UnderALauncherItUsesTheRanks) {
  std::vector<std::string> arguments{kZero,   "run",    "-n",        "2",    "--no-prefix", "--",  kZero,
                                     "bench", "stages", "--recipes", "fp32", "--stages",    "0,3", "--json"};
  arguments.insert(arguments.end(), kSmall.begin(), kSmall.end());
  Process process({arguments, {"OMP_NUM_THREADS=1", "RANK", "WORLD_SIZE"}, {}, -1});
  ASSERT_EQ(process.wait(120), 0) << process.err;
  const auto document = json::parse(process.out);
  EXPECT_EQ(document["world"], 2);
  EXPECT_NE(document["transport"], "thread");
  EXPECT_EQ(document["equal_state"]["fp32"], true);
}

}  // namespace
}  // namespace bench_test
