// `zero plan`: its text and JSON output, exit codes, error messages, and the configuration it writes, which `zero
// config check` and `zero train` accept unchanged.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "support/file_text.h"
#include "support/process.h"
#include "support/require.h"

namespace zero::test::plan_test {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

const std::string kZero = ZERO_BINARY_DIR "/bin/zero";

Ended ask(const Words& words, const std::string& columns = "80") {
  return run_to_end({Words{kZero, "plan"} + words, {"COLUMNS=" + columns}, "", -1}, 60);
}

json document(const Words& words) {
  const auto answer = ask(words + Words{"--json"});
  EXPECT_TRUE(answer.code == 0 || answer.code == 4) << answer.err;
  return json::parse(answer.out);
}

TEST(PlanCommand, ComparesEveryStageOffloadAndCheckpointing) {
  const auto plan = document({"--params", "7.5e9", "--world", "64", "--memory", "32GB"});
  EXPECT_EQ(plan["schema"], "zero.plan/1");
  EXPECT_EQ(plan["model"]["parameters"], 7500000000);
  ASSERT_EQ(plan["plans"].size(), 20u);  // stage 0 has nothing to offload
  const auto& plans = plan["plans"];
  const auto find = [&](int stage, const std::string& offload, bool again) -> const json& {
    for (const auto& each : plans)
      if (each["stage"] == stage && each["offload"] == offload && each["activation_checkpointing"] == again)
        return each;
    throw std::runtime_error("no such plan");
  };
  // ZeRO, Table 1: 31.4, 16.6 and 1.88 GB of states, padding apart.
  const auto states = [&](int stage) {
    const auto& device = find(stage, "none", false)["memory"]["device"];
    double sum = 0;
    for (const char* purpose : {"parameters", "gradients", "master_parameters", "optimizer_states"})
      sum += device[purpose]["rest_bytes"].get<double>();
    return sum / 1e9;
  };
  EXPECT_NEAR(states(1), 31.4, 0.1);
  EXPECT_NEAR(states(2), 16.6, 0.1);
  EXPECT_NEAR(states(3), 1.88, 0.01);
  const double volumes[] = {2, 2, 2, 3};
  for (int stage = 0; stage <= 3; ++stage)
    for (const bool again : {false, true}) {
      const auto& each = find(stage, "none", again);
      EXPECT_NEAR(each["traffic"]["volume"].get<double>(), volumes[stage], 1e-6) << stage;
      EXPECT_LE(find(stage, "none", true)["memory"]["device"]["peak_bytes"],
                find(stage, "none", false)["memory"]["device"]["peak_bytes"]);
    }
  EXPECT_FALSE(find(0, "none", false)["fits"]);
  EXPECT_EQ(find(0, "none", false)["misses"], "device");
  EXPECT_TRUE(find(2, "none", false)["fits"]);
  ASSERT_TRUE(plan["recommended"].is_number());
  const auto& best = plans[plan["recommended"].get<std::size_t>()];
  EXPECT_TRUE(best["fits"]);
  EXPECT_EQ(best["offload"], "none");
  EXPECT_EQ(best["stage"], 2);  // sends as little as stage 1, and fits without running layers twice
  EXPECT_EQ(plan["config"]["zero_optimization"]["stage"], 2);
  // The largest fitting sizes are consistent with what fits.
  for (const auto& each : plans) {
    EXPECT_EQ(each["largest_micro_batch_size"].get<int>() >= 1, each["fits"].get<bool>()) << each;
    EXPECT_EQ(each["largest_model_parameters"].get<double>() >= 7.4e9, each["fits"].get<bool>()) << each;
  }
}

TEST(PlanCommand, TheLargestMicroBatchIsTheLargest) {
  const Words machine{"--model", "gpt2", "--world",   "2",    "--device",        "cpu", "--memory", "4GiB",
                      "--stage", "1",    "--offload", "none", "--checkpointing", "off", "--dtype",  "fp32"};
  const auto first = document(machine)["plans"][0];
  const auto most = first["largest_micro_batch_size"].get<int>();
  ASSERT_GT(most, 1);
  const auto with = [&](int batch) {
    return document(machine + Words{"--micro-batch-size", std::to_string(batch)})["plans"][0]["fits"].get<bool>();
  };
  EXPECT_TRUE(with(most));
  EXPECT_FALSE(with(most + 1));
}

// GPT-2 has 84.9 M elements in Muon's matrices, with one state, and 39.5 M others with two; an Engine updates matrices
// whole, which files do not hold.
TEST(PlanCommand, OfMuonHasTheStatesOfEachKindAndRefusesFiles) {
  const auto plan =
      document({"--model", "gpt2", "--world", "2", "--device", "cpu", "--optimizer", "Muon", "--stage", "3"});
  ASSERT_EQ(plan["plans"].size(), 6u);
  for (const auto& each : plan["plans"]) {
    const bool files = each["offload"] == "nvme";
    EXPECT_EQ(each["fits"], !files) << each;
    EXPECT_EQ(
        each.value("refusal", "").find("is updated whole: its states are offloaded in parts") != std::string::npos,
        files);
    if (each["offload"] != "none") continue;
    const auto bytes = each["memory"]["device"]["optimizer_states"]["rest_bytes"].get<double>();
    EXPECT_NEAR(bytes / (4 * (84934656.0 + 2 * 39505152.0) / 2), 1, 1e-3);
  }
}

TEST(PlanCommand, ExitsWithFourWhenNothingFits) {
  const auto answer = ask({"--params", "1e12", "--memory", "16GB"});
  EXPECT_EQ(answer.code, 4);
  EXPECT_NE(answer.out.find("Nothing fits. Hint: more ranks"), std::string::npos) << answer.out;
  EXPECT_NE(answer.err.find("nothing fits"), std::string::npos) << answer.err;
  const auto plan = document({"--params", "1e12", "--memory", "16GB"});
  EXPECT_TRUE(plan["recommended"].is_null());
  EXPECT_FALSE(plan.contains("config"));
}

TEST(PlanCommand, TablesFitTheirColumns) {
  for (const char* columns : {"80", "100", "160"})
    for (const Words& words : {Words{"--model", "llama-3.1-405b", "-n", "1024", "--memory", "80GB", "--flops", "400T",
                                     "--network", "50GB/s"},
                               Words{"--paper", "all"}}) {
      const auto answer = ask(words, columns);
      for (const auto& line : lines(answer.out)) {
        if (line.starts_with("model") || line.starts_with("machine")) continue;  // sentences
        EXPECT_LE(line.size(), std::stoul(columns)) << line;
      }
    }
}

TEST(PlanCommand, MistakesGetTheNearestNameAndAnExample) {
  const struct {
    Words words;
    const char* expected;
  } mistakes[] = {
      {{"--parms", "7e9"}, "did you mean --params?"},
      {{"--model", "gpt2-xxl"}, "did you mean \"gpt2-xl\"?"},
      {{"--params", "many"}, "expected a number such as 7.5e9, 7.5B or 350M"},
      {{"--params", "7e9", "--memory", "lots"}, "expected a size such as 32GB"},
      {{"--params", "7e9", "--stage", "4"}, "expected all, or 0 to 3"},
      {{"--params", "7e9", "--offload", "disk"}, "expected one of all, none, cpu, nvme"},
      {{"--params", "7e9", "--world", "6", "--hosts", "4"}, "expected their product"},
      {{"--params", "7e9", "--model", "gpt2"}, "expected one model"},
      {{"--layers", "12"}, "--layers without --hidden, expected both"},
      {{"--world", "4"}, "got no model, expected --params, --model"},
      {{"--params", "7e9", "--stage", "0", "--offload", "cpu"}, "stage 0 keeps everything on the device"},
      {{"--layers", "2", "--hidden", "100", "--heads", "3"}, "expected a divisor of hidden = 100"},
  };
  for (const auto& [words, expected] : mistakes) {
    const auto answer = ask(words);
    EXPECT_EQ(answer.code, 2) << expected;
    EXPECT_NE(answer.err.find(expected), std::string::npos) << answer.err;
    EXPECT_NE(answer.err.find("Example: zero plan --params 7.5e9 --world 64 --memory 32GB"), std::string::npos)
        << answer.err;
    EXPECT_EQ(answer.out, "");
  }
  const struct {
    Words words;
    const char* expected;
  } measures[] = {
      {{"--measure"}, "[--measure] got no paper, expected --paper table2 --measure"},
      {{"--paper", "table1", "--measure"}, "[--measure] got --paper table1, expected --paper table2 --measure"},
      {{"--paper", "table2", "--budget", "8MB"}, "[--budget] got no --measure"},
      {{"--paper", "table2", "--data-parallel", "2"}, "[--data-parallel] got no --measure"},
      {{"--paper", "table2", "--measure", "--budget", "much"}, "[--budget] got \"much\", expected a size"},
      {{"--paper", "table2", "--measure", "--budget", "1MB"}, "[--budget] got 1MB, expected 2MB to 64GB a rank"},
      {{"--paper", "table2", "--measure", "--tensor-parallel", "3"}, "[--tensor-parallel] got 3, expected 1, 2 or 4"},
      {{"--paper", "table2", "--measure", "--data-parallel", "0"}, "--data-parallel"},
      {{"--paper", "table2", "--measure", "--stage", "5"}, "[--stage] got \"5\", expected all, or 0 to 3"},
  };
  for (const auto& [words, expected] : measures) {
    const auto answer = ask(words);
    EXPECT_EQ(answer.code, 2) << expected;
    EXPECT_NE(answer.err.find(expected), std::string::npos) << answer.err;
    EXPECT_EQ(answer.out, "");
  }
  const auto paper = ask({"--paper", "tabel1"});
  EXPECT_EQ(paper.code, 2);
  EXPECT_NE(paper.err.find("did you mean \"table1\"?"), std::string::npos) << paper.err;
}

TEST(PlanCommand, PrintsThePapers) {
  const auto table = json::parse(ask({"--paper", "table1", "--json"}).out)["tables"][0];
  EXPECT_EQ(table["rows"].size(), 6u);
  EXPECT_EQ(table["rows"][3], json({"64", "31.4*", "16.6", "1.88", "536", "284", "32*", "4187", "2218", "250"}));
  EXPECT_NE(ask({"--paper", "table2"}).out.find("121.6B  230.4B        2T"), std::string::npos);
}

// Within a budget, what an engine holds as model states is what Table 2's formula says, a little more for the headers
// of gradients in shared memory. The largest size fits and the next one does not.
TEST(PlanCommand, MeasuresTheLargestModels) {
  const struct {
    const char *data, *stage;
    double table2;  // 2 * 2 MB / bytes a parameter
  } runs[] = {{"1", "0", 250000}, {"2", "2", 4e6 / 9}};
  for (const auto& run : runs) {
    const auto answer = run_to_end({{kZero, "plan", "--paper", "table2", "--measure", "--budget", "2MB", "--stage",
                                     run.stage, "--tensor-parallel", "2", "--data-parallel", run.data, "--json"},
                                    {"COLUMNS=80"},
                                    "",
                                    -1},
                                   120);
    ASSERT_EQ(answer.code, 0) << answer.err;
    const auto document = json::parse(answer.out);
    EXPECT_EQ(document["tables"][0]["name"], "table2");
    EXPECT_EQ(document["measured"]["budget_bytes"], 2000000);
    ASSERT_EQ(document["measured"]["rows"].size(), 1u);
    const auto& row = document["measured"]["rows"][0];
    EXPECT_EQ(row["ranks"], 2 * std::stoi(run.data));
    EXPECT_NEAR(row["table2_parameters"].get<double>(), run.table2, 1);
    EXPECT_LT(row["by_parts_parameters"], row["table2_parameters"]);
    for (const char* criterion : {"states", "peak"}) {
      EXPECT_LE(row[criterion]["bytes"], 2000000) << row;
      EXPECT_GT(row[criterion]["next_bytes"], 2000000) << row;
      EXPECT_GT(row[criterion]["tensor_parallel_sent_bytes"], 0) << row;
      EXPECT_EQ(row[criterion]["zero_sent_bytes"] == 0, std::string(run.data) == "1") << row;
    }
    EXPECT_NEAR(row["states"]["ratio"].get<double>(), 1, 0.15) << row;
    EXPECT_LT(row["peak"]["parameters"], row["states"]["parameters"]) << row;
    const auto per_parameter = 4e6 / run.table2;
    EXPECT_GE(row["states"]["bytes"].get<double>(),
              0.99 * per_parameter * row["states"]["parameters_per_rank"].get<double>())
        << row;
    EXPECT_NE(answer.err.find("zero plan: t 2, stage " + std::string(run.stage) + ": "), std::string::npos)
        << answer.err;
  }
}

TEST(PlanCommand, PrintsTheVolumesOfABlock) {
  const Words words{"--layers",
                    "4",
                    "--hidden",
                    "16",
                    "--heads",
                    "2",
                    "--seq",
                    "8",
                    "--vocab",
                    "32",
                    "-n",
                    "2",
                    "--tensor-parallel",
                    "2",
                    "--micro-batch-size",
                    "2",
                    "--dtype",
                    "fp32",
                    "--device",
                    "cpu"};
  const auto volumes = document(words)["block_volumes"];
  EXPECT_EQ(volumes["tensor_parallel_bytes"], 6144);
  EXPECT_EQ(volumes["zero_bytes"], 4 * (12 * 16 * 16 + 13 * 16));
  EXPECT_EQ(volumes["zero_stage3_bytes"], 6 * (12 * 16 * 16 + 13 * 16));
  EXPECT_NE(ask(words).out.find("of a block, with recomputation: 12*B*(t-1)/t = 6.00KiB; ZeRO 2*P/t = 12.8KiB"),
            std::string::npos)
      << ask(words).out;
}

TEST(PlanCommand, NeedsNoLibtorch) {
  const auto folder = temporary_folder();
  fs::copy_file(kZero, folder + "/zero");  // without zero-torch in the same folder
  Process process(Words{folder + "/zero", "plan", "--model", "gpt2-xl", "--memory", "80GB"});
  EXPECT_EQ(process.wait(20), 0) << process.err;
  Process maps(Words{"/usr/bin/env", "ldd", folder + "/zero"});
  ASSERT_EQ(maps.wait(20), 0) << maps.err;
  EXPECT_EQ(maps.out.find("torch"), std::string::npos) << maps.out;
}

TEST(PlanCommand, WhatItWritesIsChecked) {
  const auto folder = temporary_folder();
  const Words places[] = {{"--offload", "none"},
                          {"--offload", "cpu", "--stage", "2"},
                          {"--offload", "nvme", "--stage", "3"},
                          {"--checkpointing", "on"}};
  for (const char* model : {"gpt2-xl", "gpt3-175b", "bert-large", "t5-11b", "llama-3-8b"})
    for (const auto& place : places) {
      const auto file = folder + "/ds.json";
      const auto answer = ask(Words{"--model", model, "--world", "64", "--nvme-path", folder, "--write", file} + place);
      ASSERT_EQ(answer.code, 0) << answer.err;
      Process check(Words{kZero, "config", "check", "--strict", "--world", "64", file});
      EXPECT_EQ(check.wait(20), 0) << check.out << check.err;
    }
}

TEST(PlanCommand, AFilesModelAndRecipeArePlanned) {
  const auto file = temporary_folder() + "/ds.json";
  std::ofstream(file) << R"({
    // as for zero train
    "train_batch_size": 16, "gradient_accumulation_steps": 2, "fp16": {"enabled": true},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "libzero": {"model": {"size": "gpt-10m", "layers": 8}}})";
  const auto plan = document({file, "--world", "4"});
  EXPECT_EQ(plan["recipe"], "fp16");
  EXPECT_EQ(plan["optimizer"], "SGD");
  EXPECT_EQ(plan["model"]["layers"], 8);
  EXPECT_EQ(plan["model"]["parameters"], 2 * 256 * 368 + 8 * (12 * 368 * 368 + 13 * 368) + 2 * 368);
  EXPECT_EQ(plan["plans"][0]["micro_batch_size"], 2);
  EXPECT_EQ(plan["plans"][0]["accumulation_steps"], 2);
  EXPECT_FALSE(plan["plans"][0]["memory"]["device"].contains("optimizer_states"));  // SGD without momentum
  EXPECT_EQ(plan["config"]["optimizer"]["type"], "SGD");
}

// A GPT has the engine's names. Others have names of the planner's own, which say nothing about a run.
TEST(PlanCommand, KeepFp32NeedsTheNamesOfAGpt) {
  const auto file = temporary_folder() + "/ds.json";
  const auto plan_of = [&](const std::string& pattern, const Words& model) {
    std::ofstream(file) << R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "optimizer": {"type": )"
                        << R"("AdamW"}, "zero_optimization": {"stage": 2}, "libzero": {"keep_fp32": ")" << pattern
                        << "\"}}";
    return ask(Words{file, "--world", "2", "--stage", "2", "--offload", "none"} + model);
  };
  const auto refused = plan_of("*.norm.*", {"--model", "gpt2"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(contains(refused.err, "libzero.keep_fp32: the pattern \"*.norm.*\" matches no parameter")) << refused.err;
  for (const Words& model : {Words{"--params", "1e8"}, {"--model", "llama-3.2-1b"}}) {
    const auto counted = plan_of("*.router.weight", model);
    EXPECT_EQ(counted.code, 0) << counted.err;
    const auto said = counted.err.find("is counted in 16 bits");
    EXPECT_NE(said, std::string::npos) << counted.err;
    EXPECT_EQ(counted.err.find("is counted in 16 bits", said + 1), std::string::npos) << counted.err;
  }
  for (const Words& model : {Words{"--model", "gpt2"}, {"--params", "1e8"}, {"--model", "llama-3.2-1b"}}) {
    const auto fits = plan_of("*norm*", model);  // the example of docs/recipes.md
    EXPECT_EQ(fits.code, 0) << fits.err;
    EXPECT_FALSE(contains(fits.err, "keep_fp32")) << fits.err;
  }
}

TEST(PlanCommand, TheSearchSaysWhichNamesItHasNot) {
  const auto file = temporary_folder() + "/ds.json";
  const auto told = [&](const std::string& pattern) {
    std::ofstream(file) << R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "optimizer": {"type": )"
                        << R"("AdamW"}, "zero_optimization": {"stage": 2}, "libzero": {"keep_fp32": ")" << pattern
                        << "\"}}";
    return ask({file, "--model", "gpt2", "--world", "2", "--stage", "2", "--offload", "none", "--memory", "16GiB"}).err;
  };
  EXPECT_TRUE(contains(told("*.qkv.weight"), R"(counts what libzero.keep_fp32 "*.qkv.weight" names in 16 bits)"));
  EXPECT_FALSE(contains(told("*norm*"), "keep_fp32"));
}

// Layers that differ are not extrapolated from the first ones.
TEST(PlanCommand, SomeLayersKeepParametersInFp32) {
  const auto file = temporary_folder() + "/ds.json";
  std::ofstream(file) << R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "optimizer": {"type": )"
                      << R"("AdamW"}, "zero_optimization": {"stage": 1}, "libzero": {"keep_fp32": "blocks.3?.*"}})";
  const Words machine{file,  "--model",   "gpt2-xl", "--world", "4",  "--device",
                      "cpu", "--memory",  "24GiB",   "--stage", "1",  "--checkpointing",
                      "off", "--offload", "none",    "--seq",   "128"};
  const auto most = document(machine)["plans"][0]["largest_micro_batch_size"].get<int>();
  ASSERT_GT(most, 1);
  const auto with = [&](int batch) {
    return document(machine + Words{"--micro-batch-size", std::to_string(batch)})["plans"][0]["fits"].get<bool>();
  };
  EXPECT_TRUE(with(most));
  EXPECT_FALSE(with(most + 1));
}

TEST(PlanCommand, AFileIsLookedAtAsItIs) {
  const auto file = temporary_folder() + "/ds.json";
  const auto write = [&](const std::string& memory) {
    std::ofstream(file)
        << R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
      "bf16": {"enabled": true}, "memory": {)"
        << memory << R"("nvme_path": "/tmp"},
      "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
      "libzero": {"model": {"layers": 2, "hidden": 128, "heads": 4, "seq_length": 64, "vocabulary": 512}}})";
  };
  const Words machine{file, "--world", "2", "--device", "cpu"};
  write("");
  const auto free = document(machine)["configured"];
  EXPECT_EQ(free["stage"], 2);
  EXPECT_EQ(free["offload"], "cpu");
  EXPECT_TRUE(free["fits"]);
  EXPECT_NE(ask(machine).out.find("given    stage 2, device "), std::string::npos);
  const auto at_rest = free["memory"]["host"]["rest_bytes"].get<long>();

  // Budgets that cannot be met are refused with the smallest feasible one; so are all plans of the comparison.
  write(R"("host": )" + std::to_string(at_rest / 2) + ", ");
  const auto tight = document(machine)["configured"];
  EXPECT_FALSE(tight["fits"]);
  EXPECT_EQ(tight["misses"], "budget");
  EXPECT_NE(tight["refusal"].get<std::string>().find("memory.host: got " + std::to_string(at_rest / 2)),
            std::string::npos)
      << tight["refusal"];
  EXPECT_NE(ask(machine).out.find("; refused: memory.host: got "), std::string::npos);

  // Budgets move states without an explicit tier: without offload keys, states leave the device.
  write(R"("device": 9500000, )");
  for (const auto& each :
       document(machine + Words{"--stage", "2", "--offload", "none", "--checkpointing", "off"})["plans"]) {
    EXPECT_TRUE(each["fits"]) << each;
    EXPECT_GT(each["memory"]["host"]["rest_bytes"], 0);
    EXPECT_LE(each["memory"]["device"]["peak_bytes"], 9500000);
  }
}

TEST(PlanCommand, AFileWithoutBatchIsPlannedForOneSample) {
  const auto plan = document({ZERO_SOURCE_DIR "/configs/deepspeed-examples/zero3-offload.json", "--world", "2"});
  EXPECT_EQ(plan["configured"]["micro_batch_size"], 1);
  EXPECT_EQ(plan["configured"]["stage"], 3);
  EXPECT_EQ(plan["optimizer"], "AdamW");
}

TEST(PlanCommand, ANameIsOfThePublishedShapeOnly) {
  EXPECT_EQ(document({"--model", "BERT base"})["model"]["name"], "bert-base");
  EXPECT_EQ(document({"--model", "bert-base", "--seq", "128"})["model"]["name"], "bert-base");
  EXPECT_TRUE(document({"--model", "gpt2", "--layers", "6", "--hidden", "768"})["model"]["name"].is_null());
}

TEST(PlanCommand, WhatItWritesTrains) {
  const auto folder = temporary_folder();
  const auto file = folder + "/ds.json";
  const Words small{"--layers", "2",  "--hidden", "64",  "--heads",     "2",    "--vocab", "256",
                    "--seq",    "32", "--device", "cpu", "--nvme-path", folder, "--write", file};
  for (const Words& place :
       {Words{"--memory", "64MiB"}, Words{"--stage", "3", "--offload", "nvme", "--checkpointing", "on"}}) {
    ASSERT_EQ(ask(small + place).code, 0);
    Process train(Words{kZero, "train", file, "--steps", "1", "--sample", "0", "--out", folder + "/run", "--json"});
    ASSERT_EQ(train.wait(120), 0) << train.err;
    EXPECT_EQ(json::parse(lines(train.out).front())["step"], 1) << train.out;
    fs::remove_all(folder + "/run");
  }
}

// A small profile written by `zero bench profile` can be read by a plan.
TEST(PlanCommand, ReadsTheProfileThatIsMeasured) {
  const auto file = temporary_folder() + "/machine.json";
  const auto profile = run_to_end({{kZero, "bench", "profile", "--quick", "--world", "1", "--steps", "2", "--recipes",
                                    "fp32", "--no-files", "--out", file},
                                   {"COLUMNS=80"},
                                   "",
                                   -1},
                                  120);
  ASSERT_EQ(profile.code, 0) << profile.err;
  EXPECT_NE(profile.out.find("1 rank at once"), std::string::npos) << profile.out;
  EXPECT_NE(profile.out.find("the fit of steps is within"), std::string::npos) << profile.out;
  const auto written = json::parse(file_text(file));
  EXPECT_EQ(written["schema"], "zero.profile/1");
  EXPECT_EQ(written["ranks"], 1);
  EXPECT_GT(written["fp32_flops_per_s"].get<double>() + written["fp32_elements_per_s"].get<double>(), 0);
  EXPECT_EQ(written["bf16_flops_per_s"], 0);
  EXPECT_EQ(written["read_bytes_per_s"], 0);
  const Words small{"--layers", "4",   "--hidden",  "128", "--vocab", "256",  "--seq",   "64",
                    "--device", "cpu", "--profile", file,  "--dtype", "fp32", "--stage", "1"};
  for (const auto& each : document(small)["plans"]) {
    EXPECT_GT(each["time"]["step_s"], 0);
    EXPECT_NE(each["time"]["bound"], "");
  }
  const auto bad = run_to_end({{kZero, "bench", "profile", "--recipes", "fp23"}, {}, "", -1});
  EXPECT_EQ(bad.code, 2);
  EXPECT_NE(bad.err.find("--recipes"), std::string::npos) << bad.err;
}

}  // namespace
}  // namespace zero::test::plan_test
