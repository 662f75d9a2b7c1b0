// `zero train --trace`: the file is strict JSON with nested slices, it shows all-gathers that overlap with compute, and
// tracing does not change results.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "support/file_text.h"
#include "support/process.h"
#include "unit/observe/trace_file.h"

namespace zero::test::train_trace_test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Words = std::vector<std::string>;

const std::string kZero = ZERO_BINARY_DIR "/bin/zero";
constexpr int kLayers = 4;

struct Place {
  Place() : folder(temporary_folder()), text(folder + "/text.txt") {
    std::ofstream out(text);
    for (unsigned i = 0, state = 7; i < 40000; ++i) {
      state = state * 1664525u + 1013904223u;
      out << "the king went over the river with seven horses"[(state >> 16) % 46];
    }
  }
  std::string folder, text;
};

struct Outcome {
  int code = 0;
  std::string out, err;
  Words numbers;        // of the steps, without the times
  std::string masters;  // bytes of the checkpoint's tensors
};

// All ranks' states, as they were saved.
std::string hashes(const std::string& checkpoint) {
  std::string all;
  std::set<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(checkpoint))
    if (entry.path().extension() == ".safetensors") files.insert(entry.path());
  for (const auto& file : files) all += file.filename().string() + "\n" + file_text(file);
  return all;
}

Outcome train(const Place& place, const std::string& name, int stage, const std::string& transport,
              const Words& arguments, const Words& environment = {}) {
  const auto out = place.folder + "/" + name;
  Words words = {kZero,
                 "run",
                 "-n",
                 "2",
                 "--no-prefix",
                 kZero,
                 "train",
                 ZERO_SOURCE_DIR "/configs/stage3-fp32.json",
                 "--text",
                 place.text,
                 "--steps",
                 "8",
                 "--json",
                 "--sample",
                 "0",
                 "--stage",
                 std::to_string(stage),
                 "--out",
                 out,
                 "--checkpoint-dir",
                 out + "/ck"};
  for (const auto& setting :
       Words{"libzero.model.layers=" + std::to_string(kLayers), "libzero.model.hidden=96", "libzero.model.heads=3",
             "libzero.model.seq_length=64", "libzero.data.eval_batches=1"}) {
    words.push_back("--set");
    words.push_back(setting);
  }
  words.insert(words.end(), arguments.begin(), arguments.end());
  Words variables = {"OMP_NUM_THREADS=1", "ZERO_TRANSPORT=" + transport};
  variables.insert(variables.end(), environment.begin(), environment.end());
  Process process(Process::Settings{words, variables, "", -1});
  Outcome outcome;
  outcome.code = process.wait(120);
  outcome.out = process.out;
  outcome.err = process.err;
  for (const auto& line : lines(process.out)) {
    const auto step = json::parse(line, nullptr, false);
    if (step.is_object())
      outcome.numbers.push_back(step["step"].dump() + step["loss"].dump() + step["grad_norm"].dump());
  }
  if (outcome.code == 0) outcome.masters = hashes(out + "/ck/global_step8");
  return outcome;
}

bool is_block(const std::string& name) { return name.find('.') != std::string::npos; }

TEST(TrainTrace, ShowsThatGathersRunDuringComputeAndChangesNothing) {
  const Place place;
  const auto plain = train(place, "plain", 3, "gloo", {});
  ASSERT_EQ(plain.code, 0) << plain.err;
  const auto file = place.folder + "/trace.json";
  const auto traced = train(place, "traced", 3, "gloo", {"--trace", file});
  ASSERT_EQ(traced.code, 0) << traced.err;
  EXPECT_EQ(traced.numbers, plain.numbers);
  ASSERT_EQ(traced.numbers.size(), 8u);
  ASSERT_GT(plain.masters.size(), 100000u);
  EXPECT_TRUE(traced.masters == plain.masters) << "the states of the two runs differ";

  const auto events = read_trace(file);
  EXPECT_EQ(nesting_fault(events), "");
  EXPECT_FALSE(fs::exists(file + ".rank-0.json"));
  for (const int rank : {0, 1}) {
    // Steps 3 to 8, each with its phases.
    const auto steps = slices(events, "compute", "step", rank);
    ASSERT_EQ(steps.size(), 6u);
    EXPECT_EQ(steps.front().value, 3);
    EXPECT_EQ(steps.back().value, 8);
    for (const auto& step : steps) {
      Words phases;
      for (const auto& phase : slices(events, "compute", "phase", rank))
        if (phase.begin >= step.begin && phase.end <= step.end) phases.push_back(phase.name);
      EXPECT_EQ(phases, (Words{"forward", "backward", "step()"}));
    }
    EXPECT_EQ(slices(events, "optimizer", "update", rank).size(), 6u * (kLayers + 1));
    for (const char* track : {"waits", "reductions"}) EXPECT_GT(slices(events, track, "", rank).size(), 6u) << track;
    for (const auto& reduction : slices(events, "reductions", "reduce", rank)) EXPECT_GT(reduction.value, 1000);

    // The gather of the next unit begins before the compute of the current one ends, and ends after it.
    auto gathers = slices(events, "gathers", "gather", rank);
    for (const auto& more : slices(events, "gathers 2", "gather", rank)) gathers.push_back(more);
    EXPECT_EQ(gathers.size(), 6u * 2 * (kLayers + 1)) << "forward and backward gather every group";
    for (const char* pass : {"forward", "backward"}) {
      int ahead = 0, units = 0;
      const auto passes = slices(events, "compute", pass, rank);
      for (std::size_t i = 0; i + 1 < passes.size(); ++i) {
        const auto &now = passes[i], &next = passes[i + 1];
        if (!is_block(now.name) || !is_block(next.name)) continue;
        ++units;
        for (const auto& gather : gathers)
          ahead += gather.name == next.name && gather.begin > now.begin && gather.begin < now.end &&
                   gather.end > now.end && gather.end < next.end;
      }
      EXPECT_GE(units, 6 * (kLayers - 1)) << pass;
      EXPECT_GE(ahead, 6 * (kLayers - 2)) << pass << " of rank " << rank;
    }
  }
  const auto result = json::parse(file_text(place.folder + "/traced/result.json"));
  const auto& summary = result.at("trace");
  EXPECT_EQ(summary["steps"], 6);
  EXPECT_EQ(summary["joined"], true);
  EXPECT_GT(summary["compute_s"], 0);
  EXPECT_GT(summary["communication_s"], summary["reduce_wait_s"]);
  EXPECT_GT(summary["hidden_share"], 0.0);
  EXPECT_LE(summary["hidden_share"], 1.0);
  EXPECT_GE(summary["step_s"].get<double>(), summary["compute_s"].get<double>() * 0.5);
  EXPECT_NE(traced.err.find("ui.perfetto.dev"), std::string::npos) << traced.err;
}

TEST(TrainTrace, EveryStageAndBothTransports) {
  const Place place;
  for (const std::string transport : {"gloo", "shm"}) {
    for (int stage = 0; stage < 4; ++stage) {
      const auto name = transport + std::to_string(stage);
      const auto file = place.folder + "/" + name + ".trace";
      // From the environment, as for any program.
      const auto o = train(place, name, stage, transport, {}, {"ZERO_TRACE=" + file, "ZERO_TRACE_STEPS=2:3"});
      ASSERT_EQ(o.code, 0) << o.err;
      const auto events = read_trace(file);
      EXPECT_EQ(nesting_fault(events), "") << name;
      for (const int rank : {0, 1}) {
        const auto steps = slices(events, "compute", "step", rank);
        ASSERT_EQ(steps.size(), 2u) << name;
        EXPECT_EQ(steps[0].value, 2);
        std::size_t reductions = 0, published = 0, in_place = 0;
        for (const auto& [track, list] : tracks(events))
          if (track.first == rank)
            for (const auto& slice : list) {
              reductions += slice.category == "reduce";
              published += slice.category == "publish";
              in_place += slice.category == "gather,in-place";
            }
        EXPECT_GE(reductions, 2u * (kLayers + 1)) << name;
        EXPECT_EQ(published, stage == 1 || stage == 2 ? 2u * (kLayers + 1) : 0u) << name;
        if (stage < 3 || transport == "gloo") EXPECT_EQ(in_place, 0u) << name;
        if (stage == 3 && transport == "shm") EXPECT_GT(in_place, 0u) << name;
      }
    }
  }
}

TEST(TrainTrace, MistakesAreNamedAtTheStart) {
  const Place place;
  const struct {
    Words words;
    std::string says;
  } cases[] = {
      {{"--trace", place.folder + "/missing/trace.json"}, "a folder that exists"},
      {{"--trace-steps", "1:2"}, "--trace"},
      {{"--trace", place.folder + "/t.json", "--trace-steps", "5:4"}, "A:B"},
      {{"--trace", place.folder + "/t.json", "--trace-steps", "0:4"}, "A:B"},
      {{"--trace", place.folder + "/t.json", "--trace-steps", "1-4"}, "A:B"},
  };
  for (const auto& c : cases) {
    const auto o = train(place, "bad", 3, "gloo", c.words);
    EXPECT_EQ(o.code, 2) << o.err;
    EXPECT_NE(o.err.find(c.says), std::string::npos) << o.err;
    EXPECT_TRUE(o.numbers.empty());
  }
  // A part that cannot be made on one rank ends both, before any step.
  fs::create_directories(place.folder + "/t.json.rank-1.json");
  const auto o = train(place, "taken", 3, "gloo", {"--trace", place.folder + "/t.json"});
  EXPECT_EQ(o.code, 5) << o.err;
  EXPECT_NE(o.err.find("t.json.rank-1.json"), std::string::npos) << o.err;
  EXPECT_TRUE(o.numbers.empty());
}

TEST(TrainTrace, AKilledRunLeavesPartsThatABracketCloses) {
  const Place place;
  const auto file = place.folder + "/trace.json";
  Process process(Process::Settings{{kZero,
                                     "run",
                                     "-n",
                                     "2",
                                     "--no-prefix",
                                     kZero,
                                     "train",
                                     ZERO_SOURCE_DIR "/configs/stage3-fp32.json",
                                     "--text",
                                     place.text,
                                     "--steps",
                                     "100000",
                                     "--json",
                                     "--out",
                                     place.folder + "/out",
                                     "--trace",
                                     file,
                                     "--trace-steps",
                                     "2:",
                                     "--set",
                                     "libzero.model.layers=2",
                                     "--set",
                                     "libzero.model.hidden=48",
                                     "--set",
                                     "libzero.model.heads=3",
                                     "--set",
                                     "libzero.model.seq_length=32"},
                                    {"OMP_NUM_THREADS=1"},
                                    "",
                                    -1});
  ASSERT_TRUE(process.wait_for("\"step\": 6,", 60)) << process.err;
  process.signal(SIGKILL);  // the launcher; the kernel ends the ranks
  process.wait(20);
  for (const int rank : {0, 1}) {
    auto text = file_text(file + ".rank-" + std::to_string(rank) + ".json");
    EXPECT_FALSE(json::accept(text));
    // If the run ended during a write, the last line is incomplete.
    if (text.back() != '}' || !json::accept(text + "]")) text.resize(text.rfind(",\n"));
    const auto events = json::parse(text + "]");
    EXPECT_EQ(nesting_fault(events), "");
    EXPECT_GE(slices(events, "compute", "step", rank).size(), 4u);
  }
  EXPECT_FALSE(fs::exists(file));
}

TEST(TrainTrace, BenchStepTracesStepsThatItDoesNotMeasure) {
  const Place place;
  const auto file = place.folder + "/t.json";
  Process process(Process::Settings{
      {kZero, "bench",        "step",        "--stages", "2,3",    "--recipes", "fp32", "--rounds", "2", "--steps",
       "2",   "--warmup",     "1",           "--layers", "2",      "--hidden",  "64",   "--heads",  "2", "--sequence",
       "32",  "--no-compute", "--transport", "gloo",     "--json", "--trace",   file},
      {},
      "",
      -1});
  ASSERT_EQ(process.wait(120), 0) << process.err;
  const auto runs = json::parse(process.out).at("runs");
  ASSERT_EQ(runs.size(), 2u);
  for (const auto& run : runs) {
    const auto name = place.folder + "/t.fp32-stage" + run["stage"].dump() + ".json";
    EXPECT_EQ(run["trace"]["file"], name);
    EXPECT_EQ(run["trace"]["steps"], 5);
    EXPECT_EQ(run["samples"]["step_s"].size(), 4u);
    const auto events = read_trace(name);
    EXPECT_EQ(nesting_fault(events), "");
    for (const int rank : {0, 1}) EXPECT_EQ(slices(events, "compute", "step", rank).size(), 5u);
  }
}

TEST(TrainTrace, ARunTooShortForItsStepsSaysSo) {
  const Place place;
  const auto o = train(place, "short", 2, "shm", {"--trace", place.folder + "/t.json", "--trace-steps", "9:"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.err.find("the trace is empty"), std::string::npos) << o.err;
  EXPECT_TRUE(slices(read_trace(place.folder + "/t.json"), "compute").empty());
}

}  // namespace
}  // namespace zero::test::train_trace_test
