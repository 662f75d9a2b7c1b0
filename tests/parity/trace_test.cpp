// A trace through the public interface, ranks as threads: which steps it shows, that it changes no bit, that its
// sums are those of its slices, and what is refused.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <zero/library.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "parity/problems.h"
#include "parity/training.h"
#include "support/folder.h"
#include "unit/observe/trace_file.h"

namespace zero::test::trace_test {
namespace {

namespace fs = std::filesystem;

Training setup_of(int stage, int accumulation = 1) {
  Training setup;
  setup.stage = stage;
  setup.accumulation = accumulation;
  return setup;
}

void one_step(Engine& engine, torch::nn::Module& module, int rank, int step) {
  for (std::int64_t micro = 0; micro < engine.accumulation_steps(); ++micro) {
    engine.backward(loss_of(problem("gpt"), module, rank, step, at::kFloat));
    engine.step();
  }
}

// The state's digest after six steps, of which `traced` are in a trace.
std::string digest(const Training& setup, const std::string& file, TraceSteps traced, TraceSummary* summary) {
  std::string hash;
  std::mutex mutex;
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    auto module = make_module(problem("gpt"));
    Engine engine(module, Options::from_json(json_of(setup)), comm);
    if (!file.empty()) engine.start_trace(file, traced);
    for (int step = 0; step < 6; ++step) one_step(engine, *module, comm->rank(), step);
    const auto end = engine.stop_trace();
    const auto own = engine.state_hash();
    std::lock_guard lock(mutex);
    hash = own;
    if (comm->rank() == 0 && summary != nullptr) *summary = end;
  });
  return hash;
}

double seconds_of(const std::vector<TraceSlice>& list) {
  std::int64_t sum = 0;
  for (const auto& slice : list) sum += slice.end - slice.begin;
  return static_cast<double>(sum) * 1e-9;
}

TEST(EngineTrace, ShowsTheChosenStepsAndChangesNoBit) {
  for (int stage = 0; stage < 4; ++stage) {
    const TempFolder folder;
    TraceSummary summary, none;
    const auto setup = setup_of(stage, 2);
    const auto hash = digest(setup, folder.file("trace.json"), {2, 4}, &summary);
    EXPECT_EQ(hash, digest(setup, "", {}, &none)) << "stage " << stage;
    EXPECT_EQ(none.steps, 0);
    EXPECT_EQ(summary.steps, 3);
    EXPECT_TRUE(summary.joined);
    EXPECT_EQ(summary.file, folder.file("trace.json"));
    const auto events = read_trace(folder.file("trace.json"));
    EXPECT_EQ(nesting_fault(events), "") << "stage " << stage;
    const auto steps = slices(events, "compute", "step");
    ASSERT_EQ(steps.size(), 3u);
    EXPECT_EQ(steps[0].value, 2);
    EXPECT_EQ(steps[2].value, 4);
    std::vector<std::string> phases;
    for (const auto& phase : slices(events, "compute", "phase"))
      if (phase.begin >= steps[0].begin && phase.end <= steps[0].end) phases.push_back(phase.name);
    EXPECT_EQ(phases, (std::vector<std::string>{"forward", "backward", "forward", "backward", "step()"}));
    std::vector<std::int64_t> lengths;
    for (const auto& step : steps) lengths.push_back(step.end - step.begin);
    std::sort(lengths.begin(), lengths.end());
    EXPECT_NEAR(summary.step_s, static_cast<double>(lengths[1]) * 1e-9, 2e-9);
    const auto passes = seconds_of(slices(events, "compute", "phase"));
    EXPECT_LE(summary.compute_s, passes);
    EXPECT_GT(summary.compute_s, 0);
    EXPECT_GT(summary.optimizer_s, 0);
    EXPECT_LE(summary.optimizer_s, seconds_of(slices(events, "optimizer")));
    EXPECT_GE(summary.hidden, 0);
    EXPECT_LE(summary.hidden, 1);
    EXPECT_GT(slices(events, "reductions").size(), 0u);
  }
}

TEST(EngineTrace, ATraceMayFollowAnother) {
  const TempFolder folder;
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    auto module = make_module(problem("gpt"));
    Engine engine(module, Options::from_json(json_of(setup_of(3))), comm);
    int step = 0;
    for (const std::string name : {"a", "b"}) {
      engine.start_trace(folder.file(name));
      one_step(engine, *module, comm->rank(), step++);
      EXPECT_EQ(engine.stop_trace().steps, 1);
      one_step(engine, *module, comm->rank(), step++);
    }
    engine.save_checkpoint(folder.text() + "/ck", "untraced");
    engine.start_trace(folder.file("c"));
    engine.save_checkpoint(folder.text() + "/ck", "traced");
    engine.load_checkpoint(folder.text() + "/ck", "traced");
    engine.stop_trace();
  });
  for (const std::string name : {"a", "b"})
    EXPECT_EQ(slices(read_trace(folder.file(name)), "compute", "step", 1).size(), 1u);
  const auto files = slices(read_trace(folder.file("c")), "files");
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].name, "save");
  EXPECT_EQ(files[1].name, "load");
}

// After an error an Engine cannot use its communicator, so each refusal has a new one.
template <class Refused>
void expect_refusal(int begun_micro_batches, const std::function<void(Engine&)>& call) {
  auto module = make_module(problem("gpt"));
  Engine engine(module, Options::from_json(json_of(setup_of(2, 2))), Communicator::local());
  for (int i = 0; i < begun_micro_batches; ++i) {
    engine.backward(loss_of(problem("gpt"), *module, 0, i, at::kFloat));
    engine.step();
  }
  EXPECT_THROW(call(engine), Refused);
}

TEST(EngineTrace, WhatIsRefused) {
  const TempFolder folder;
  expect_refusal<ConfigError>(0, [](Engine& engine) { engine.start_trace(""); });
  expect_refusal<ConfigError>(0, [&](Engine& engine) { engine.start_trace(folder.file("trace.json"), {0, 3}); });
  expect_refusal<ConfigError>(0, [&](Engine& engine) { engine.start_trace(folder.file("trace.json"), {4, 3}); });
  expect_refusal<IoError>(0, [&](Engine& engine) { engine.start_trace(folder.text() + "/missing/trace.json"); });
  expect_refusal<ConfigError>(1, [&](Engine& engine) { engine.start_trace(folder.file("trace.json")); });
  expect_refusal<ConfigError>(2, [&](Engine& engine) {
    engine.start_trace(folder.file("trace.json"));
    EXPECT_EQ(engine.stop_trace().file, folder.file("trace.json"));
    EXPECT_EQ(engine.stop_trace().file, "");
    engine.start_trace(folder.file("trace.json"));
    engine.start_trace(folder.file("other"));
  });
  for (const char* text : {"", ":", "a", "3:", "3:x", "3:2", "0:2", "-1:2", "1:2:3", " 1:2"}) {
    const bool good = std::string(text) == "3:";
    try {
      TraceSteps::parse(text, "--trace-steps");
      EXPECT_TRUE(good) << text;
    } catch (const ConfigError& error) {
      EXPECT_FALSE(good) << text;
      EXPECT_NE(std::string(error.what()).find("--trace-steps"), std::string::npos);
    }
  }
  EXPECT_EQ(TraceSteps::parse("5:9", "x").last, 9);
  EXPECT_EQ(TraceSteps::parse("7", "x").last, 7);
}

TEST(EngineTrace, TheEnvironmentTracesOneEngineOfAProgram) {
  const TempFolder folder;
  ::setenv("ZERO_TRACE", folder.file("trace.json").c_str(), 1);
  ::setenv("ZERO_TRACE_STEPS", "2:2", 1);
  std::vector<std::string> warnings;
  set_log_sink([&](LogLevel level, std::string_view line) {
    if (level == LogLevel::Warning) warnings.emplace_back(line);
  });
  {
    auto module = make_module(problem("gpt")), other = make_module(problem("gpt"));
    Engine engine(module, Options::from_json(json_of(setup_of(1))), Communicator::local());
    Engine second(other, Options::from_json(json_of(setup_of(1))), Communicator::local());
    for (int step = 0; step < 3; ++step) {
      one_step(engine, *module, 0, step);
      one_step(second, *other, 0, step);
    }
  }
  ::unsetenv("ZERO_TRACE");
  ::unsetenv("ZERO_TRACE_STEPS");
  set_log_sink(nullptr);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("another Engine"), std::string::npos) << warnings[0];
  const auto steps = slices(read_trace(folder.file("trace.json")), "compute", "step");
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_EQ(steps[0].value, 2);
}

}  // namespace
}  // namespace zero::test::trace_test
