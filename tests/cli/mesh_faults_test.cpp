// Every command that takes degrees of tensor and sequence parallelism refuses what cannot be with the exit code of its
// kind, and with the values that can be.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "support/folder.h"
#include "support/process.h"

namespace zero::test::mesh_faults_test {
namespace {

struct Fault {
  Words words;
  std::vector<std::string> parts;  // of stderr, or of stdout for `zero config`
  int code = 2;
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
    write("no-batch.json",
          R"({"optimizer": {"type": "AdamW"}, "tensor_parallel": {"autotp_size": 2, "preset_model": "gpt"}})");
    return made;
  }();
  return path;
}

void expect_fault(const Fault& fault) {
  std::string text;
  for (const auto& word : fault.words) text += word + " ";
  SCOPED_TRACE(text);
  auto words = Words{ZERO_BINARY_DIR "/bin/zero"} + fault.words;
  const auto run = run_to_end({words, {"COLUMNS=200", "OMP_NUM_THREADS=1", "RANK", "WORLD_SIZE"}, folder(), -1}, 60);
  EXPECT_EQ(run.code, fault.code) << run.err;
  const auto& told = fault.words[0] == "config" ? run.out : run.err;
  for (const auto& part : fault.parts) EXPECT_NE(told.find(part), std::string::npos) << part << " in\n" << told;
}

const char* const kNothing = R"(tensor_parallel.partition_config={"layer_specs": [{"patterns": ["nothing"]}]})";

TEST(MeshFaults, Plan) {
  const Words gpt2{"plan", "--model", "gpt2"};
  for (const Fault& fault :
       std::vector<Fault>{{gpt2 + Words{"--world", "4", "--tensor-parallel", "3"},
                           {"zero plan: error: [Options] 4 ranks are no multiple of tensor_parallel.autotp_size 3 x "
                            "sequence_parallel_size 1. "
                            "Hint: start 6 ranks, or choose degrees whose product divides 4."}},
                          {gpt2 + Words{"--world", "64", "--tensor-parallel", "16"},
                           {"tensor_parallel.autotp_size 16 x sequence_parallel_size 1 and 12 heads, expected at least "
                            "one head for each rank. "
                            "Hint: choose degrees whose product is at most 12."}},
                          {gpt2 + Words{"--world", "64", "--sequence-parallel", "64"},
                           {"got sequence_parallel_size 64 and 12 heads", "at most 12."}},
                          {gpt2 + Words{"--world", "4", "--tensor-parallel", "0"},
                           {"[--tensor-parallel] got \"0\", expected a whole number from 1 to 65536"}},
                          {gpt2 + Words{"--world", "4", "--sequence-parallel", "99999999999999999999"},
                           {"[--sequence-parallel] got \"9999"}},
                          {gpt2 + Words{"--world", "4", "--config", "tp2.json", "--tensor-parallel", "4"},
                           {"/tensor_parallel/autotp_size: got 4 by CLI --tensor-parallel and 2 by tp2.json:1:",
                            "hint: give one of the two"}},
                          {gpt2 + Words{"--world", "4", "--tensor-parallel", "2", "--set", kNothing},
                           {"(nothing) matches no parameter"}}})
    expect_fault(fault);
}

TEST(MeshFaults, Explain) {
  const Words stage3{"explain", "stage", "3"};
  for (const Fault& fault : std::vector<Fault>{
           {stage3 + Words{"--world", "8", "--tensor-parallel", "8"},
            {"zero explain: error: [plan] got tensor_parallel.autotp_size 8", "and 4 heads", "at most 4."}},
           {stage3 + Words{"--world", "8", "--sequence-parallel", "8"}, {"got sequence_parallel_size 8 and 4 heads"}},
           {stage3 + Words{"--world", "3", "--sequence-parallel", "2", "--live"},
            {"3 ranks are no multiple of", "start 4 ranks"}},
           {stage3 + Words{"--world", "2", "--tensor-parallel", "2", "--set", "tensor_parallel.autotp_size=1"},
            {"/tensor_parallel/autotp_size: got 1 by --set and 2 by --tensor-parallel, expected the same"}},
           {stage3 + Words{"--config", "tp2.json", "--set", kNothing}, {"(nothing) matches no parameter"}}})
    expect_fault(fault);
}

TEST(MeshFaults, BenchStep) {
  const Words step{"bench",     "step", "--layers", "1", "--hidden", "32", "--heads",  "4", "--stages",    "0",
                   "--recipes", "fp32", "--rounds", "1", "--steps",  "1",  "--warmup", "0", "--no-compute"};
  for (const Fault& fault :
       std::vector<Fault>{{step + Words{"--tensor-parallel", "3"},
                           {"2 ranks are no multiple of tensor_parallel.autotp_size 3", "start 3 ranks"}},
                          {step + Words{"--world", "8", "--tensor-parallel", "8"},
                           {"and 4 heads, expected at least one head", "at most 4."}},
                          {step + Words{"--tensor-parallel", "2", "--set", "tensor_parallel.autotp_size=1"},
                           {"got 2 by CLI --tensor-parallel and 1 by --set"}},
                          {step + Words{"--tensor-parallel", "1", "--set", "tensor_parallel.autotp_size=2"},
                           {"got 1 by CLI --tensor-parallel and 2 by --set"}},
                          {step + Words{"--sequence-parallel", "1", "--set", "sequence_parallel_size=2"},
                           {"got 1 by CLI --sequence-parallel and 2 by --set"}},
                          {step + Words{"--tensor-parallel", "2", "--set", kNothing},
                           {"(nothing) matches no parameter", "exit code 2 (usage or configuration)"}}})
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
           {train("tp2.json", {"--tensor-parallel", "1"}),
            {"got 1 by CLI --tensor-parallel and 2 by tp2.json:1:", "exit code 2"}},
           {train("dp.json", {}), {"/data_parallel_size (dp.json:1:", "got 4, expected 1"}},
           {train("tp2.json", {"--set", kNothing}), {"(nothing) matches no parameter"}},
           {train("sp3.json", {}), {"2 ranks are no multiple of", "start 3 ranks"}},
           {train("field.json", {}), {"did you mean scatter_input?"}},
           {train("tp2.json", {"--set", "tensor_parallel.autotp_size=65536", "--set", "sequence_parallel_size=65536"}),
            {"expected at least one head for each rank"}}})
    expect_fault(fault);
}

TEST(MeshFaults, Config) {
  for (const Fault& fault :
       std::vector<Fault>{{{"config", "check", "tp2.json", "--world", "3"},
                           {"tp2.json:1:",
                            "error: /tensor_parallel/autotp_size: 3 ranks are no multiple of "
                            "tensor_parallel.autotp_size 2 x sequence_parallel_size 1 [conflict]",
                            "hint: start 4 ranks, or choose degrees whose product divides 3."}},
                          {{"config", "check", "sp3.json", "--world", "4"},
                           {"error: /sequence_parallel_size: 4 ranks are no multiple of", "hint: start 6 ranks"}},
                          {{"config", "check", "dp.json", "--world", "4"},
                           {"error: /data_parallel_size: got 4, expected 2 (4 ranks / (", "hint: leave it out."}},
                          {{"config", "check", "field.json"},
                           {"/tensor_parallel/partition_config/layer_specs/0/scater_input: got an unknown field",
                            "hint: did you mean scatter_input?"}},
                          {{"config", "check", "no-batch.json"},
                           {"got neither train_batch_size nor train_micro_batch_size_per_gpu", "[missing]"}},
                          {{"config", "check", "no-batch.json", "--world", "3"},
                           {"got neither train_batch_size nor train_micro_batch_size_per_gpu", "[missing]",
                            "3 ranks are no multiple of", "2 errors"}},
                          {{"config", "explain", "tp2.json", "--world", "3"}, {"cannot be resolved for 3 ranks"}},
                          {{"config", "check", "tp2.json", "--world", "4"}, {"0 errors"}, 0}})
    expect_fault(fault);
}

// A record that is none of a mesh.
TEST(MeshFaults, Report) {
  const auto run = folder() + "/run";
  std::filesystem::create_directory(run);
  std::ofstream(run + "/log.jsonl") << R"({"step": 1, "loss": 2.5, "step_ms": 3.0})"
                                    << "\n";
  const auto expect_of_mesh = [&](const std::string& mesh, const std::string& part) {
    std::ofstream(run + "/run.json") << R"({"schema": "zero.run/1", "started": "today", "command": ["zero"], "stage": 1,
      "world": 2, "mesh": )" + mesh + "}";
    expect_fault({{"report", "run"}, {"zero report: error: [report] got run/run.json: " + part}});
  };
  expect_of_mesh(R"({"dp": 1, "sp": 1, "tp": "two"})", "type must be number, but is string");
  expect_of_mesh(R"({"dp": 2, "sp": 1, "tp": 2, "parameters_per_rank": 5})",
                 "a mesh of 2 dp x 1 sp x 2 tp for 2 ranks");
  expect_fault({{"report", "nowhere"}, {"got no folder nowhere"}, 5});
}

}  // namespace
}  // namespace zero::test::mesh_faults_test
