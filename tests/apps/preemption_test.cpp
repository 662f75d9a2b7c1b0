// A run that is asked to stop saves, ends with 75, and continues with the numbers of a run that nobody stopped:
// whichever process gets the signal, how often, and whether or not a save is under way. One run is stopped again and
// again; at the end each step is compared. ZERO_PREEMPTIONS sets how often; what goes beyond the list below is drawn.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "support/training_job.h"

namespace zero::test::preemption_test {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

enum class To { Launcher, OneRank, AllRanks };
enum class When { BetweenSaves, DuringASave };

struct Stop {
  int signal;
  To to;
  int times = 1;
  When when = When::BetweenSaves;
  bool background = false;  // saves
};

constexpr int kRanks = 3;

std::string text_of(const Stop& stop) {
  return std::string(stop.signal == SIGTERM ? "SIGTERM" : "SIGUSR1") + " to " +
         (stop.to == To::Launcher  ? "the launcher"
          : stop.to == To::OneRank ? "one rank"
                                   : "all ranks") +
         (stop.times > 1 ? ", twice" : "") + (stop.when == When::DuringASave ? ", during a save" : "") +
         (stop.background ? " in the background" : "");
}

std::set<std::string> names_in(const std::string& folder, const std::string& prefix) {
  std::set<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (const auto name = entry.path().filename().string(); name.starts_with(prefix) && !name.ends_with("-latest"))
      names.insert(name);
  return names;
}

// A folder of a save that was not there at the start.
bool wait_for_save(TrainingJob& job, const std::string& checkpoints, const std::set<std::string>& before) {
  for (const auto end = Clock::now() + std::chrono::seconds(60); Clock::now() < end; ::usleep(200))
    for (const auto& name : names_in(checkpoints, ".tmp-"))
      if (!before.contains(name)) return true;
  ADD_FAILURE() << "no save began: " << job.err;
  return false;
}

Words training(const std::string& folder, const std::string& checkpoints, const std::string& steps) {
  return {"--json",    "--steps", steps, "--out",    folder + "/out", "--sample",     "0", "--checkpoint-dir",
          checkpoints, "--keep",  "3",   "--resume", "auto",          "--save-every", "4"};
}

std::vector<Stop> stops() {
  std::vector<Stop> all = {
      {SIGTERM, To::Launcher},
      {SIGUSR1, To::Launcher},
      {SIGTERM, To::OneRank},
      {SIGUSR1, To::OneRank},
      {SIGTERM, To::AllRanks},
      {SIGUSR1, To::OneRank, 2},  // a repeated request
      {SIGTERM, To::Launcher, 1, When::DuringASave},
      {SIGTERM, To::OneRank, 1, When::DuringASave},
      {SIGTERM, To::Launcher, 1, When::DuringASave, true},
      {SIGUSR1, To::OneRank, 1, When::DuringASave, true},
      {SIGTERM, To::Launcher, 2},  // no time for a save
      {SIGTERM, To::Launcher, 2, When::DuringASave},
  };
  const char* text = std::getenv("ZERO_PREEMPTIONS");
  const std::size_t count = text == nullptr ? all.size() : std::strtoul(text, nullptr, 10);
  std::minstd_rand random(20261125);
  while (all.size() < count) all.push_back(all[random() % 12]);
  return all;
}

// Expects that the steps of `out` have the numbers that they had before, and adds them.
void merge(std::map<std::int64_t, std::string>& seen, const std::string& out) {
  for (const auto& [step, numbers] : losses_of(out))
    EXPECT_EQ(seen.emplace(step, numbers).first->second, numbers) << step;
}

TEST(Preemption, EachStopLosesNothing) {
  const std::string folder = temporary_folder(), checkpoints = folder + "/ck";
  std::minstd_rand random(4711);
  std::map<std::int64_t, std::string> seen;
  int saved = 0, killed = 0;
  for (const auto& stop : stops()) {
    SCOPED_TRACE(text_of(stop));
    const auto before = names_in(checkpoints, ".tmp-");
    TrainingJob job(
        kRanks, {"--grace", "1"},
        training(folder, checkpoints, "1000000") +
            Words{"--set", std::string("checkpoint.writer.decoupled=") + (stop.background ? "true" : "false")},
        folder);
    ASSERT_TRUE(job.wait_for("\"loss\":", 60)) << job.err;
    if (stop.when == When::DuringASave) {
      ASSERT_TRUE(wait_for_save(job, checkpoints, before));
    } else {
      ::usleep(static_cast<useconds_t>(random() % 300000));
    }
    std::vector<pid_t> whom;
    if (stop.to == To::Launcher) whom.push_back(job.pid());
    if (stop.to == To::OneRank) whom.push_back(job.pid_of(static_cast<int>(random() % kRanks)));
    if (stop.to == To::AllRanks)
      for (int rank = 0; rank < kRanks; ++rank) whom.push_back(job.pid_of(rank));
    for (int time = 0; time < stop.times; ++time)
      for (const pid_t pid : whom) {
        // The launcher reads equal signals that come at once as one.
        const bool again = time > 0 && stop.to == To::Launcher;
        ASSERT_TRUE(!again || job.wait_for("s to save and stop", 20)) << job.err;
        ::kill(pid, stop.signal);
      }
    const bool by_force = stop.times > 1 && stop.to == To::Launcher;
    const int code = job.wait(60);
    // The ranks may have saved before the second signal.
    EXPECT_TRUE(code == 75 || (by_force && code == 143)) << code << " " << job.err;
    ++(code == 75 ? saved : killed);
    EXPECT_TRUE(left_behind("ZERO_RUN_ID=" + job.run_id(), 5).empty());
    merge(seen, job.out);
    if (code == 75) {
      ASSERT_FALSE(seen.empty());
      EXPECT_TRUE(fs::exists(checkpoints + "/global_step" + std::to_string(seen.rbegin()->first))) << job.err;
      EXPECT_TRUE(names_in(checkpoints, ".tmp-").empty());
    }
    const auto verified = run_to_end({{ZERO_BINARY_DIR "/bin/zero", "checkpoint", "verify", checkpoints}, {}, {}, -1});
    EXPECT_EQ(verified.code, 0) << verified.err;
  }
  const auto last = std::to_string(seen.rbegin()->first + 5);
  for (const auto& root : {checkpoints, folder + "/undisturbed"}) {
    TrainingJob job(kRanks, {}, training(folder, root, last), folder);
    ASSERT_EQ(job.wait(60 + static_cast<double>(seen.size())), 0) << job.err;
    merge(seen, job.out);
  }
  ASSERT_EQ(std::to_string(seen.size()), last);
  std::cout << saved << " stops with a save (exit 75), " << killed << " by a second signal (143); " << last
            << " steps bit-equal to an undisturbed run\n";
  EXPECT_GE(saved, 10);
}

}  // namespace
}  // namespace zero::test::preemption_test
