// Every command that takes degrees of tensor and sequence parallelism refuses what cannot be with the exit code of its
// kind, and with the values that can be.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "support/folder.h"
#include "support/golden_texts.h"
#include "support/process.h"
#include "support/require.h"

namespace zero::test::mesh_faults_test {
namespace {

struct Fault {
  const char* entry;  // of tests/golden/mesh_errors.txt: the command, its exit code, and all it says
  Words words;
};

const std::string& folder() {
  static const std::string path = [] {
    const auto made = temporary_folder();
    const auto write = [&](const std::string& name, const std::string& text) {
      std::ofstream(made + "/" + name) << text;
    };
    const std::string start = R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, )";
    write("text.txt", std::string(4000, 'x'));
    write("tp2.json", start + R"("tensor_parallel": {"autotp_size": 2, "preset_model": "gpt"}})");
    write("sp3.json", start + R"("sequence_parallel_size": 3})");
    write("dp.json",
          start + R"("data_parallel_size": 4, "tensor_parallel": {"autotp_size": 2, "preset_model": "gpt"}})");
    write("field.json", start + R"("tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [
      {"patterns": ["up"], "scater_input": true}]}}})");
    write("experts.json", start + R"("libzero": {"model": {"layers": 2, "hidden": 32, "heads": 2,
      "experts": {"num_experts": 8}}}})");
    write("ep2.json", start + R"("libzero": {"model": {"experts": {"num_experts": 8, "ep_size": 2}}}})");
    write("pipeline.json", start + R"("pipeline": {"stages": 2}, "expert_parallel": {"enabled": true}})");
    write("no-batch.json",
          R"({"optimizer": {"type": "AdamW"}, "tensor_parallel": {"autotp_size": 2, "preset_model": "gpt"}})");
    return made;
  }();
  return path;
}

// What a launcher tells of its ranks depends on which rank ends first. Their error does not: that of the report, or
// else the longest that a rank wrote.
std::string without_order(const std::string& told) {
  if (!contains(told, "zero run: FAILED")) return told;
  const std::string label = "  error        ", start = ": error: ";
  if (const auto from = told.find(label); from != std::string::npos)
    return told.substr(from + label.size(), told.find("\n  where  ", from) - from - label.size());
  std::string longest;
  for (const std::string rank : {"[0] ", "[1] "}) {
    std::string text;
    for (const auto& line : lines(told))
      if (const auto from = line.find(rank); from != std::string::npos) text += line.substr(from + rank.size()) + "\n";
    if (const auto from = text.find(start); from != std::string::npos && text.size() > longest.size())
      longest = text.substr(from + start.size());
  }
  return longest;
}

void expect_fault(const Fault& fault) {
  std::string command = "zero";
  for (const auto& word : fault.words) command += " " + word;
  auto words = Words{ZERO_BINARY_DIR "/bin/zero"} + fault.words;
  const auto run = run_to_end({words, {"COLUMNS=200", "OMP_NUM_THREADS=1", "RANK", "WORLD_SIZE"}, folder(), -1}, 60);
  const bool as_json = fault.words.back() == "--json";
  const auto& told = fault.words[0] == "config" || as_json ? run.out + run.err : run.err;
  EXPECT_NO_THROW(
      require_golden(fault.entry, command + "\nexit code " + std::to_string(run.code) + "\n" + without_order(told)));
}

const char* const kNothing = R"(tensor_parallel.partition_config={"layer_specs": [{"patterns": ["nothing"]}]})";

TEST(MeshFaults, Plan) {
  const Words gpt2{"plan", "--model", "gpt2"};
  for (const Fault& fault : std::vector<Fault>{
           {"plan: ranks that do not divide", gpt2 + Words{"--world", "4", "--tensor-parallel", "3"}},
           {"plan: fewer heads than tp ranks", gpt2 + Words{"--world", "64", "--tensor-parallel", "16"}},
           {"plan: fewer heads than sp ranks", gpt2 + Words{"--world", "64", "--sequence-parallel", "64"}},
           {"plan: degree 0", gpt2 + Words{"--world", "4", "--tensor-parallel", "0"}},
           {"plan: degree too large", gpt2 + Words{"--world", "4", "--sequence-parallel", "99999999999999999999"}},
           {"plan: two degrees", gpt2 + Words{"--world", "4", "--config", "tp2.json", "--tensor-parallel", "4"}},
           {"plan: pattern of nothing", gpt2 + Words{"--world", "4", "--tensor-parallel", "2", "--set", kNothing}}})
    expect_fault(fault);
}

TEST(MeshFaults, Explain) {
  const Words stage3{"explain", "stage", "3"};
  for (const Fault& fault : std::vector<Fault>{
           {"explain: fewer heads than tp ranks", stage3 + Words{"--world", "8", "--tensor-parallel", "8"}},
           {"explain: fewer heads than sp ranks", stage3 + Words{"--world", "8", "--sequence-parallel", "8"}},
           {"explain: ranks that do not divide", stage3 + Words{"--world", "3", "--sequence-parallel", "2", "--live"}},
           {"explain: two degrees",
            stage3 + Words{"--world", "2", "--tensor-parallel", "2", "--set", "tensor_parallel.autotp_size=1"}},
           {"explain: pattern of nothing", stage3 + Words{"--config", "tp2.json", "--set", kNothing}}})
    expect_fault(fault);
}

TEST(MeshFaults, BenchStep) {
  const Words step{"bench",     "step", "--layers", "1", "--hidden", "32", "--heads",  "4", "--stages",    "0",
                   "--recipes", "fp32", "--rounds", "1", "--steps",  "1",  "--warmup", "0", "--no-compute"};
  for (const Fault& fault : std::vector<Fault>{
           {"bench: ranks that do not divide", step + Words{"--tensor-parallel", "3"}},
           {"bench: fewer heads than ranks", step + Words{"--world", "8", "--tensor-parallel", "8"}},
           {"bench: two degrees, 1 by --set",
            step + Words{"--tensor-parallel", "2", "--set", "tensor_parallel.autotp_size=1"}},
           {"bench: two degrees, 2 by --set",
            step + Words{"--tensor-parallel", "1", "--set", "tensor_parallel.autotp_size=2"}},
           {"bench: two degrees of sequence parallelism",
            step + Words{"--sequence-parallel", "1", "--set", "sequence_parallel_size=2"}},
           {"bench: ranks that do not divide, --json", {"bench", "step", "--tensor-parallel", "3", "--json"}},
           {"bench: pattern of nothing", step + Words{"--tensor-parallel", "2", "--set", kNothing}}})
    expect_fault(fault);
}

TEST(MeshFaults, Train) {
  const auto train = [](const std::string& config, const Words& more) {
    return Words{"run",     "-n",
                 "2",       "zero",
                 "train",   config,
                 "--text",  "text.txt",
                 "--steps", "1",
                 "--set",   "libzero.model.layers=1",
                 "--set",   "libzero.model.hidden=32",
                 "--set",   "libzero.model.heads=4",
                 "--set",   "libzero.model.seq_length=8"} +
           more;
  };
  for (const Fault& fault : std::vector<Fault>{
           {"train: two degrees", train("tp2.json", {"--tensor-parallel", "1"})},
           {"train: data_parallel_size", train("dp.json", {})},
           {"train: pattern of nothing", train("tp2.json", {"--set", kNothing})},
           {"train: ranks that do not divide", train("sp3.json", {})},
           {"train: unknown field", train("field.json", {})},
           {"train: fewer heads than ranks", train("tp2.json", {"--set", "tensor_parallel.autotp_size=65536", "--set",
                                                                "sequence_parallel_size=65536"})}})
    expect_fault(fault);
}

TEST(MeshFaults, Config) {
  for (const Fault& fault : std::vector<Fault>{
           {"config check: ranks that do not divide by tp", {"config", "check", "tp2.json", "--world", "3"}},
           {"config check: ranks that do not divide by sp", {"config", "check", "sp3.json", "--world", "4"}},
           {"config check: data_parallel_size", {"config", "check", "dp.json", "--world", "4"}},
           {"config check: unknown field", {"config", "check", "field.json"}},
           {"config check: no batch", {"config", "check", "no-batch.json"}},
           {"config check: no batch and ranks", {"config", "check", "no-batch.json", "--world", "3"}},
           {"config explain: ranks that do not divide", {"config", "explain", "tp2.json", "--world", "3"}},
           {"config check: pipeline and AutoEP", {"config", "check", "pipeline.json"}},
           {"config check: no fault", {"config", "check", "tp2.json", "--world", "4"}}})
    expect_fault(fault);
}

TEST(MeshFaults, Experts) {
  const Words gpt2{"plan", "--model", "gpt2"}, moe{"--moe", "--num-experts", "8"};
  const auto train = [](const Words& more) {
    return Words{"train", "experts.json", "--text", "text.txt", "--steps", "1"} + more;
  };
  for (const Fault& fault : std::vector<Fault>{
           {"experts: ep_size that divides no ranks", gpt2 + moe + Words{"--world", "6", "--ep-world-size", "4"}},
           {"experts: ep_size that divides no experts", gpt2 + moe + Words{"--world", "6", "--ep-world-size", "3"}},
           {"experts: k above their number", gpt2 + moe + Words{"--top-k", "9"}},
           {"experts: unknown policy", gpt2 + moe + Words{"--set", "libzero.model.experts.noisy_gate_policy=Jiter"}},
           {"experts: RSample and k 2",
            gpt2 + moe + Words{"--top-k", "2", "--set", "libzero.model.experts.noisy_gate_policy=RSample"}},
           {"experts: capacity factor 0", gpt2 + moe + Words{"--set", "libzero.model.experts.capacity_factor=0"}},
           {"experts: tensor parallelism", gpt2 + moe + Words{"--world", "4", "--tensor-parallel", "2"}},
           {"experts: no GPT", Words{"plan", "--model", "llama-3-8b"} + moe},
           {"experts: a number of parameters", Words{"plan", "--params", "7.5e9"} + moe},
           {"experts: no number", gpt2 + Words{"--moe"}},
           {"experts: no --moe", gpt2 + Words{"--top-k", "2"}},
           {"experts: interval above the layers",
            gpt2 + moe + Words{"--set", "libzero.model.experts.expert_interval=13"}},
           {"experts: explain, ep_size that divides no ranks",
            Words{"explain", "--world", "3"} + moe + Words{"--ep-world-size", "2"}},
           {"experts: train, flags that disagree", train({"--moe", "--num-experts", "4"})},
           {"experts: train, ep_size that divides no ranks", train({"--moe", "--ep-world-size", "2"})},
           {"experts: train, interval above the layers", train({"--set", "libzero.model.experts.expert_interval=3"})},
           {"experts: config check", {"config", "check", "ep2.json", "--world", "3"}}})
    expect_fault(fault);
}

// The same faults for programs that read --json.
TEST(MeshFaults, AsJson) {
  for (const Fault& fault : std::vector<Fault>{
           {"plan: ranks that do not divide, --json",
            {"plan", "--model", "gpt2", "--world", "4", "--tensor-parallel", "3", "--json"}},
           {"plan: pattern of nothing, --json",
            {"plan", "--model", "gpt2", "--world", "4", "--tensor-parallel", "2", "--set", kNothing, "--json"}},
           {"explain: fewer heads than tp ranks, --json",
            {"explain", "stage", "3", "--world", "8", "--tensor-parallel", "8", "--json"}},
           {"config check: unknown field, --json", {"config", "check", "field.json", "--json"}},
           {"config check: pipeline and AutoEP, --json", {"config", "check", "pipeline.json", "--json"}},
           {"report: no folder, --json", {"report", "nowhere", "--json"}}})
    expect_fault(fault);
}

// A record that is none of a mesh.
TEST(MeshFaults, Report) {
  const auto run = folder() + "/run";
  std::filesystem::create_directory(run);
  std::ofstream(run + "/log.jsonl") << R"({"step": 1, "loss": 2.5, "step_ms": 3.0})"
                                    << "\n";
  const auto expect_of_mesh = [&](const char* entry, const std::string& mesh) {
    std::ofstream(run + "/run.json") << R"({"schema": "zero.run/1", "started": "today", "command": ["zero"], "stage": 1,
      "world": 2, "mesh": )" + mesh + "}";
    expect_fault({entry, {"report", "run"}});
  };
  expect_of_mesh("report: degree that is no number", R"({"dp": 1, "sp": 1, "tp": "two"})");
  expect_of_mesh("report: mesh of other ranks", R"({"dp": 2, "sp": 1, "tp": 2, "parameters_per_rank": 5})");
  expect_fault({"report: no folder", {"report", "nowhere"}});
}

}  // namespace
}  // namespace zero::test::mesh_faults_test
