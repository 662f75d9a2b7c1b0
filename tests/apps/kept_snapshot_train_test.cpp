// Real training that is killed again and again continues from snapshots in memory, with the losses of a run that nobody
// disturbed. ZERO_KEPT_KILLS sets how often (20 in long campaigns).
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "support/process.h"
#include "support/training_job.h"

namespace zero::test::kept_snapshot_train_test {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr int kEvery = 5;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

Words training(const std::string& folder, int steps) {
  return {"--json", "--steps", std::to_string(steps), "--sample", "0", "--checkpoint-dir", folder + "/ck"};
}
const Words kKeep = {"--resume", "auto", "--keep-snapshot-every", std::to_string(kEvery)};

std::string step_text(std::int64_t step) { return "\"step\": " + std::to_string(step) + ","; }
std::int64_t number_after(const std::string& text, std::size_t at, const std::string& before) {
  return at == std::string::npos ? -1 : std::atoll(text.c_str() + at + before.size());
}

using Memory = std::vector<std::pair<dev_t, ino_t>>;

// The memory for kept snapshots that a process has open.
Memory kept_memory_of(const fs::path& process) {
  Memory found;
  std::error_code error;
  for (const auto& fd : fs::directory_iterator(process / "fd", error)) {
    struct stat info {};
    if (fs::read_symlink(fd.path(), error).string().starts_with("/memfd:zero-kept") &&
        stat(fd.path().c_str(), &info) == 0)
      found.emplace_back(info.st_dev, info.st_ino);
  }
  return found;
}
Memory kept_memory_of(pid_t pid) { return kept_memory_of(fs::path("/proc") / std::to_string(pid)); }

TEST(KeptSnapshotTrain, KillsLoseFewSteps) {
  const char* const asked = std::getenv("ZERO_KEPT_KILLS");
  const int kills = asked ? std::atoi(asked) : 3, steps = 20 * kills + 20;
  const std::string folder = temporary_folder(), alone = temporary_folder();
  std::mt19937 random(5);
  TrainingJob p(2, {"--restarts", std::to_string(kills), "--grace", "0"}, training(folder, steps) + kKeep, folder);
  Memory memory;
  int beyond = 0;
  double slowest = 0;
  std::int64_t begin = 0;
  for (int kill_number = 0; kill_number < kills; ++kill_number) {
    // At any time of a step; most of it is forward and backward.
    ASSERT_TRUE(p.wait_for(step_text(begin + 12 + static_cast<std::int64_t>(random() % kEvery)), 120)) << p.err;
    usleep(static_cast<useconds_t>(random() % 30000));
    const int rank = static_cast<int>(random() % 2);
    if (memory.empty()) {
      memory = kept_memory_of(p.pid());
      EXPECT_EQ(memory.size(), 2u);
      EXPECT_EQ(kept_memory_of(p.pid_of(1)).size(), 1u) << "a rank has another's memory";
    }
    kill(p.pid_of(rank, kill_number), SIGKILL);
    const auto death = Clock::now();
    const std::string line = "[0] zero train: resumed from the kept snapshot of step ";
    const auto known = p.err.size();
    while (p.err.find(line, known) == std::string::npos) {
      ASSERT_LT(seconds_since(death), 60) << p.err;
      p.wait_for("never", 0.02);
    }
    const std::size_t resumed = p.err.find(line, known);
    const std::int64_t from = number_after(p.err, resumed, line);
    // Steps that were complete, as the launcher's report says.
    const std::string report = "where        step ";
    const std::int64_t reached = number_after(p.err, p.err.rfind(report, resumed), report);
    EXPECT_EQ(from % kEvery, 0);
    EXPECT_GT(from, begin) << "no progress";
    EXPECT_GE(reached, from);
    EXPECT_LE(reached - from, 2 * kEvery) << p.err;
    beyond += reached - from > kEvery;
    begin = from;
    ASSERT_TRUE(p.wait_for(step_text(reached + 1), 60)) << p.err;
    slowest = std::max(slowest, seconds_since(death));
  }
  EXPECT_EQ(p.wait(200), 0) << p.err;
  std::error_code error;
  for (const auto& process : fs::directory_iterator("/proc", error))
    for (const auto& open : kept_memory_of(process.path()))
      EXPECT_EQ(std::count(memory.begin(), memory.end(), open), 0) << "memory is left in " << process.path();

  TrainingJob undisturbed(2, {}, training(alone, steps), alone);
  EXPECT_EQ(undisturbed.wait(200), 0) << undisturbed.err;
  const auto losses = losses_of(p.out);
  EXPECT_EQ(losses.size(), static_cast<std::size_t>(steps));
  EXPECT_EQ(losses, losses_of(undisturbed.out)) << "bit for bit: what JSON shows has all digits";
  std::printf("%d kills: %d lost more than %d steps; from a death to the first new step %.2f s at most\n", kills,
              beyond, kEvery, slowest);
}

// What is on disk is newer, or of another number of ranks.
TEST(KeptSnapshotTrain, AnotherNumberOfRanksContinuesFromDisk) {
  const std::string folder = temporary_folder();
  TrainingJob p(3, {"--restarts", "4", "--min-ranks", "2", "--grace", "0"},
                training(folder, 60) + kKeep +
                    Words{"--save-every", "20", "--set", "train_batch_size=6", "--micro-batch-size", "1"},
                folder);
  ASSERT_TRUE(p.wait_for(step_text(28), 150)) << p.err;
  kill(p.pid_of(2), SIGKILL);
  ASSERT_TRUE(p.wait_for("resumed from the kept snapshot of step ", 60)) << p.err;
  ASSERT_TRUE(p.wait_for(step_text(34), 60)) << p.err;
  kill(p.pid_of(2, 1), SIGKILL);
  EXPECT_EQ(p.wait(200), 0) << p.err;
  EXPECT_TRUE(p.says("resumed from " + folder + "/ck/global_step20 at step 20")) << p.err;
}

TEST(KeptSnapshotTrain, CountsTowardsTheBudget) {
  const std::string folder = temporary_folder();
  const Words budget = {"--set", "memory.host=200000", "--set", "zero_optimization.offload_optimizer.device=none"};
  TrainingJob with(2, {"--restarts", "1"}, training(folder, 2) + kKeep + budget, folder);
  EXPECT_EQ(with.wait(60), 4) << with.err;
  EXPECT_TRUE(with.says("memory.host")) << with.err;
  // Without a launcher that restarts, nothing is kept.
  TrainingJob without(2, {}, training(folder, 2) + kKeep + budget, folder);
  EXPECT_EQ(without.wait(60), 0) << without.err;
}

}  // namespace
}  // namespace zero::test::kept_snapshot_train_test
