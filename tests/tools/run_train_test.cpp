// `zero run` with real training: the library's status reaches the launcher, and a run that loses a rank resumes with
// the same numbers. Tests with simulated ranks are in run_failure_test.cpp.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <string>

#include "support/nightly.h"
#include "support/training_job.h"

namespace zero::test::run_train_test {
namespace {

TEST(RunTrain, AKilledRankIsNamedWithItsStep) {
  for (const int number : {SIGKILL, SIGSEGV}) {
    const std::string folder = temporary_folder();
    TrainingJob p(2, {}, {"--steps", "1000000"}, folder);
    ASSERT_TRUE(p.wait_for("step 5/", 100)) << p.err;
    kill(p.pid_of(1), number);
    const auto death = std::chrono::steady_clock::now();
    EXPECT_EQ(p.wait(60), 6) << p.err;
    EXPECT_LE(std::chrono::steady_clock::now() - death, std::chrono::seconds(5));
    EXPECT_TRUE(p.says("root cause   rank 1 of 2, host ")) << p.err;
    EXPECT_TRUE(p.says(": killed by signal " + std::to_string(number))) << p.err;
    EXPECT_TRUE(p.says("\n  where        step ")) << p.err;
    EXPECT_TRUE(p.says("collateral   rank 0 ")) << p.err;
    EXPECT_TRUE(left_behind("ZERO_RUN_ID=" + p.run_id(), 0).empty());
  }
}

TEST(RunTrain, AStoppedRankIsNamed) {
  const std::string folder = temporary_folder();
  TrainingJob p(2, {"--hang-timeout", "4", "--grace", "1"}, {"--steps", "1000000"}, folder);
  ASSERT_TRUE(p.wait_for("step 5/", 100)) << p.err;
  kill(p.pid_of(1), SIGSTOP);
  EXPECT_EQ(p.wait(60), 6) << p.err;
  EXPECT_TRUE(p.says("root cause   rank 1 of 2, host ")) << p.err;
  EXPECT_TRUE(p.says("the process is stopped")) << p.err;
  EXPECT_TRUE(left_behind("ZERO_RUN_ID=" + p.run_id(), 0).empty());
}

TEST(RunTrain, ARestartContinuesToTheSameNumbers) {
  const std::string folder = temporary_folder(), other = temporary_folder();
  const std::size_t steps = nightly() ? 400 : 50;
  const Words training = {"--json",   "--steps", std::to_string(steps), "--save-every", "20",
                          "--resume", "auto",    "--checkpoint-dir"};
  TrainingJob p(2, {"--max-restarts", "2", "--grace", "1"}, training + Words{folder + "/ck"}, folder);
  ASSERT_TRUE(p.wait_for("\"step\": 30,", 150) || p.wait_for("\"step\":30,", 1)) << p.out << p.err;
  kill(p.pid_of(1), SIGKILL);
  EXPECT_EQ(p.wait(200), 0) << p.err;
  EXPECT_TRUE(p.says("zero run: FAILED (exit 6)")) << p.err;
  EXPECT_TRUE(p.says("restart 1 of 2")) << p.err;
  EXPECT_TRUE(p.says("resumed from")) << p.err;
  TrainingJob whole(2, {}, training + Words{other + "/ck"}, other);
  EXPECT_EQ(whole.wait(200), 0) << whole.err;
  const auto expected = losses_of(whole.out);
  EXPECT_EQ(expected.size(), steps) << whole.out.substr(0, 1000);
  EXPECT_EQ(losses_of(p.out), expected);
}

}  // namespace
}  // namespace zero::test::run_train_test
