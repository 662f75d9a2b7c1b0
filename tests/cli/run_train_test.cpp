// `zero run` with real training: the library's status reaches the launcher, and a run that loses a rank resumes with
// the same numbers. Tests with simulated ranks are in run_failure_test.cpp.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/process.h"

namespace zero::test::run_train_test {
namespace {

using nlohmann::json;
using Words = std::vector<std::string>;

const std::string kZero = ZERO_BINARY_DIR "/bin/zero";

std::string text_file(const std::string& folder) {
  std::ofstream out(folder + "/text.txt");
  for (unsigned i = 0, state = 7; i < 12000; ++i) {
    state = state * 1664525u + 1013904223u;
    out << (state >> 16) % 1000 << (i % 9 ? " " : "\n");
  }
  return folder + "/text.txt";
}

// A small model; one line a step.
struct TrainingJob : Process {
  TrainingJob(const Words& options, const Words& training, const std::string& folder)
      : Process(Settings{
            Words{kZero, "run", "-n", "2"} + options +
                Words{"zero", "train", ZERO_SOURCE_DIR "/configs/stage3-bf16.json", "--text", text_file(folder)} +
                Words{"--set", "steps_per_print=1", "--set", "libzero.model.layers=2", "--set",
                      "libzero.model.hidden=48", "--set", "libzero.model.heads=3", "--set",
                      "libzero.model.seq_length=32", "--set", "libzero.data.eval_batches=1"} +
                training,
            {"OMP_NUM_THREADS=1"},
            folder,
            -1}) {}
  std::string run_id() const {
    const std::size_t at = err.find(", run ");
    return at == std::string::npos ? "" : err.substr(at + 6, err.find_first_of(",\n", at + 6) - at - 6);
  }
  pid_t pid_of(int rank) const {
    const auto run = with_environment("ZERO_RUN_ID=" + run_id());
    for (const pid_t p : with_environment("RANK=" + std::to_string(rank)))
      if (std::find(run.begin(), run.end(), p) != run.end()) return p;
    throw std::runtime_error("no process of rank " + std::to_string(rank));  // no number: kill(-1) reaches everybody
  }
  bool says(const std::string& text) const { return err.find(text) != std::string::npos; }
};

TEST(RunTrain, AKilledRankIsNamedWithItsStep) {
  for (const int number : {SIGKILL, SIGSEGV}) {
    const std::string folder = temporary_folder();
    TrainingJob p({}, {"--steps", "1000000"}, folder);
    ASSERT_TRUE(p.wait_for("step 5/", 100)) << p.err;
    kill(p.pid_of(1), number);
    EXPECT_EQ(p.wait(60), 6) << p.err;
    EXPECT_TRUE(p.says("root cause   rank 1 of 2, host ")) << p.err;
    EXPECT_TRUE(p.says(": killed by signal " + std::to_string(number))) << p.err;
    EXPECT_TRUE(p.says("\n  where        step ")) << p.err;
    EXPECT_TRUE(p.says("collateral   rank 0 ")) << p.err;
    EXPECT_TRUE(left_behind("ZERO_RUN_ID=" + p.run_id(), 0).empty());
  }
}

TEST(RunTrain, AStoppedRankIsNamed) {
  const std::string folder = temporary_folder();
  TrainingJob p({"--hang-timeout", "4", "--grace", "1"}, {"--steps", "1000000"}, folder);
  ASSERT_TRUE(p.wait_for("step 5/", 100)) << p.err;
  kill(p.pid_of(1), SIGSTOP);
  EXPECT_EQ(p.wait(60), 6) << p.err;
  EXPECT_TRUE(p.says("root cause   rank 1 of 2, host ")) << p.err;
  EXPECT_TRUE(p.says("the process is stopped")) << p.err;
  EXPECT_TRUE(left_behind("ZERO_RUN_ID=" + p.run_id(), 0).empty());
}

TEST(RunTrain, ARestartGoesOnToTheSameNumbers) {
  const auto losses = [](const std::string& out) {
    std::vector<std::string> all(1);
    for (const std::string& line : lines(out)) {
      const json step = json::parse(line.substr(std::min<std::size_t>(4, line.size())), nullptr, false);
      if (!step.is_object() || !step.contains("loss") || !step.contains("step")) continue;
      const std::size_t at = step["step"];
      all.resize(std::max(all.size(), at + 1));
      all[at] = step["loss"].dump() + " " + step["grad_norm"].dump();  // a repeated step overwrites
    }
    return all;
  };
  const std::string folder = temporary_folder(), other = temporary_folder();
  const Words training = {"--json", "--steps", "400", "--save-every", "50", "--resume", "auto", "--checkpoint-dir"};
  TrainingJob p({"--max-restarts", "2", "--grace", "1"}, training + Words{folder + "/ck"}, folder);
  ASSERT_TRUE(p.wait_for("\"step\": 70,", 150) || p.wait_for("\"step\":70,", 1)) << p.out << p.err;
  kill(p.pid_of(1), SIGKILL);
  EXPECT_EQ(p.wait(200), 0) << p.err;
  EXPECT_TRUE(p.says("zero run: FAILED (exit 6)")) << p.err;
  EXPECT_TRUE(p.says("restart 1 of 2")) << p.err;
  EXPECT_TRUE(p.says("resumed from")) << p.err;
  TrainingJob whole({}, training + Words{other + "/ck"}, other);
  EXPECT_EQ(whole.wait(200), 0) << whole.err;
  const auto expected = losses(whole.out);
  EXPECT_EQ(expected.size(), 401u) << whole.out.substr(0, 1000);
  EXPECT_EQ(losses(p.out), expected);
}

}  // namespace
}  // namespace zero::test::run_train_test
