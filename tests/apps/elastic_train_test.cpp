// Runs that continue after deaths: on fewer ranks with the numbers of a run that was started there, without reading a
// sample twice or skipping one; and again and again, with a bounded number of checkpoints. ZERO_CRASH_LOOPS sets how
// often the last one is killed.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "support/file_text.h"
#include "support/process.h"
#include "support/training_job.h"

namespace zero::test::elastic_train_test {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

const std::string kZero = ZERO_BINARY_DIR "/bin/zero";

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// The word after the last `before`.
std::string last_word_after(const std::string& text, const std::string& before) {
  const std::size_t at = text.rfind(before);
  if (at == std::string::npos) return "";
  const std::size_t begin = at + before.size();
  return text.substr(begin, text.find_first_of(" \n", begin) - begin);
}

std::string digest_of(const std::string& checkpoints, const std::string& tag) {
  const Ended ended = run_to_end({{kZero, "checkpoint", "digest", checkpoints, "--tag", tag}, {}, {}, -1});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_GE(ended.out.size(), 32u);
  return ended.out.substr(0, 32);
}

void copy_checkpoint(const std::string& from, const std::string& to, const std::string& tag) {
  fs::create_directories(to);
  fs::copy(from + "/" + tag, to + "/" + tag, fs::copy_options::recursive);
}

TEST(ElasticTrain, ContinuesWithTheNumbersOfARunOnFewerRanks) {
  const std::string folder = temporary_folder(), by_hand = temporary_folder(), whole = temporary_folder();
  const Words training = {
      "--json", "--steps",      "120", "--set",           "train_batch_size=12", "--micro-batch-size",
      "1",      "--save-every", "10",  "--checkpoint-dir"};
  TrainingJob p(4, {"--restarts", "4", "--min-ranks", "2", "--grace", "1"},
                training + Words{folder + "/ck", "--resume", "auto", "--out", folder + "/out"}, folder);
  ASSERT_TRUE(p.wait_for("\"step\": 25,", 150)) << p.out << p.err;
  kill(p.pid_of(3), SIGKILL);
  ASSERT_TRUE(p.wait_for("resumed from", 60)) << p.err;
  for (const std::size_t before = p.out.size(); p.out.size() < before + 600;) ASSERT_FALSE(p.wait_for("never", 0.05));
  const auto death = Clock::now();
  kill(p.pid_of(3, 1), SIGKILL);
  ASSERT_TRUE(p.wait_for("\"ranks\": 3", 60)) << p.err;
  const double to_step = seconds_since(death);
  EXPECT_EQ(p.wait(200), 0) << p.err;
  EXPECT_TRUE(p.says("restart 2 of 4 on 3 ranks (was 4: slot 3 died twice) in 1 s")) << p.err;
  EXPECT_NE(file_text(folder + "/out/run.json").find("2, the last one on 3 ranks after 4"), std::string::npos);
  const std::string tag = fs::path(last_word_after(p.err, "resumed from ")).filename();
  ASSERT_EQ(tag.find("global_step"), 0u) << p.err;
  const std::int64_t first = std::atoll(tag.c_str() + 11);
  ASSERT_GE(first, 20);

  copy_checkpoint(folder + "/ck", by_hand + "/ck", tag);
  const auto start = Clock::now();
  TrainingJob three(3, {}, training + Words{by_hand + "/ck", "--resume", tag}, by_hand);
  ASSERT_TRUE(three.wait_for("\"ranks\": 3", 60)) << three.err;
  const double start_and_load = seconds_since(start);
  EXPECT_EQ(three.wait(200), 0) << three.err;
  auto went_on = losses_of(p.out);
  EXPECT_EQ(went_on.size(), 120u);
  std::erase_if(went_on, [&](const auto& step) { return step.first <= first; });
  EXPECT_EQ(went_on, losses_of(three.out)) << "bit for bit: what JSON shows has all digits";
  EXPECT_EQ(digest_of(folder + "/ck", "global_step120"), digest_of(by_hand + "/ck", "global_step120"));
  std::printf("from the death to the first step on 3 ranks: %.2f s; start and load alone: %.2f s\n", to_step,
              start_and_load);
  EXPECT_LE(to_step, 5 + start_and_load);

  // The same samples meet in each step as on four ranks, summed in another order.
  TrainingJob four(4, {}, training + Words{whole + "/ck"}, whole);
  EXPECT_EQ(four.wait(200), 0) << four.err;
  const auto expected = losses_of(four.out);
  double worst = 0;
  for (std::int64_t step = first + 1; step <= first + 20; ++step) {
    const double a = std::stod(went_on.at(step)), b = std::stod(expected.at(step));
    worst = std::max(worst, std::abs(a - b) / std::abs(b));
  }
  std::printf("largest relative difference of 20 losses on 3 ranks from those on 4: %.2g\n", worst);
  EXPECT_LE(worst, 2e-5);
}

// The samples that the ranks of the last attempt at each step read.
std::map<std::int64_t, std::vector<std::int64_t>> samples_of(const std::string& folder) {
  std::map<std::int64_t, std::pair<int, std::vector<std::int64_t>>> steps;
  for (const auto& entry : fs::directory_iterator(folder)) {
    int attempt = 0, rank = 0;
    if (std::sscanf(entry.path().filename().c_str(), "ids-%d-%d", &attempt, &rank) != 2) continue;
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);) {
      std::istringstream words(line);
      std::int64_t step = 0;
      if (!(words >> step)) continue;
      auto& [newest, ids] = steps[step];
      if (attempt < newest) continue;
      if (attempt > newest) ids.clear();
      newest = attempt;
      for (std::int64_t id = 0; words >> id;) ids.push_back(id);
    }
  }
  std::map<std::int64_t, std::vector<std::int64_t>> all;
  for (const auto& [step, found] : steps) all[step] = found.second;
  return all;
}

TEST(ElasticTrain, ReadsEachSampleOfAnEpochOnce) {
  constexpr int kSteps = 20, kBatch = 12;
  const std::string folder = temporary_folder(), by_hand = temporary_folder(), text = folder + "/text";
  std::mt19937 random(11);
  std::ofstream out(text);
  for (int i = 0; i < kSteps * kBatch * 16 + 1; ++i) out << static_cast<char>('a' + random() % 26);
  out.close();
  const std::string program = ZERO_BINARY_DIR "/tests/elastic_program";
  // From 4 ranks to 3, and to 2; each time from a step that no checkpoint has.
  Process p({{kZero, "run", "-n", "4", "--restarts", "6", "--min-ranks", "2", "--grace=1", program, text, folder, "20",
              "0:3:4", "1:3:6", "2:2:10", "3:2:14"},
             {"OMP_NUM_THREADS=1"},
             {},
             -1});
  EXPECT_EQ(p.wait(150), 0) << p.err;
  EXPECT_NE(p.err.find(" on 3 ranks (was 4: slot 3 died twice)"), std::string::npos) << p.err;
  EXPECT_NE(p.err.find(" on 2 ranks (was 3: slot 2 died twice)"), std::string::npos) << p.err;
  const auto steps = samples_of(folder);
  ASSERT_EQ(steps.size(), static_cast<std::size_t>(kSteps));
  std::vector<std::int64_t> seen;
  for (const auto& [step, ids] : steps) {
    EXPECT_EQ(ids.size(), static_cast<std::size_t>(kBatch)) << "step " << step;
    seen.insert(seen.end(), ids.begin(), ids.end());
  }
  std::sort(seen.begin(), seen.end());
  for (std::int64_t i = 0; i < kSteps * kBatch; ++i)
    ASSERT_EQ(seen.at(static_cast<std::size_t>(i)), i) << "a sample was skipped or read twice";

  // The last part again, started by hand with two ranks.
  const std::string tag = last_word_after(p.out, "continues from ");
  EXPECT_NE(p.out.find("continues from " + tag + " on 2 ranks"), std::string::npos) << p.out;
  copy_checkpoint(folder + "/checkpoints", by_hand + "/checkpoints", tag);
  Process two({{kZero, "run", "-n", "2", program, text, by_hand, "20"}, {"OMP_NUM_THREADS=1"}, {}, -1});
  EXPECT_EQ(two.wait(60), 0) << two.err;
  EXPECT_NE(two.out.find("continues from " + tag + " on 2 ranks"), std::string::npos) << two.out;
  EXPECT_EQ(digest_of(folder + "/checkpoints", "step20"), digest_of(by_hand + "/checkpoints", "step20"));
}

struct Inventory {
  int whole = 0, temporary = 0;
};
Inventory inventory_of(const std::string& root) {
  Inventory found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(root, error)) {
    const std::string name = entry.path().filename();
    if (name == "latest" || name == ".lock") continue;
    ++(name[0] == '.' ? found.temporary : found.whole);
  }
  return found;
}

TEST(ElasticTrain, CrashLoopsInsideSavesKeepFewCheckpoints) {
  const char* const asked = std::getenv("ZERO_CRASH_LOOPS");
  const int loops = asked ? std::atoi(asked) : 8;
  const std::string folder = temporary_folder(), other = temporary_folder();
  const std::string steps = std::to_string(10 * loops + 8);
  const Words training = {"--json", "--steps",  steps,  "--save-every", "2", "--keep",
                          "3",      "--resume", "auto", "--sample",     "0", "--checkpoint-dir"};
  const unsigned seed = 26;
  std::mt19937 random(seed);
  Inventory most;
  int between = 0;
  for (int loop = 0; loop < loops; ++loop) {
    TrainingJob p(1, {"--grace", "0"}, training + Words{folder + "/ck"}, folder);
    // Inside one of the first saves of this start: at its begin, some time later, or right after the commit.
    // Twice in a row right after the first one: what the first kill left over must be gone by then.
    const bool twice = loop % 4 >= 2;
    const int saves = twice ? 1 : 1 + static_cast<int>(random() % 5);
    const bool after_commit = twice || random() % 3 == 0;
    const auto later = static_cast<useconds_t>(after_commit ? 0 : random() % 8000);
    bool struck = false;
    std::string newest;
    const auto names = [&] {
      std::vector<std::string> list;
      std::error_code error;
      for (const auto& entry : fs::directory_iterator(folder + "/ck", error)) list.push_back(entry.path().filename());
      return list;
    };
    const auto before = names();
    std::vector<std::string> events;
    const auto end = Clock::now() + std::chrono::seconds(60);
    while (!struck && Clock::now() < end) {
      for (const std::string& name : names()) {
        const bool wanted =
            after_commit ? name.starts_with("global_step") : name.starts_with(".tmp-") && !name.ends_with("-latest");
        if (!wanted || std::count(before.begin(), before.end(), name) || std::count(events.begin(), events.end(), name))
          continue;
        events.push_back(name);
        struck = static_cast<int>(events.size()) == saves;
      }
      usleep(200);
    }
    ASSERT_TRUE(struck) << p.out << p.err;
    usleep(later);
    kill(p.pid(), SIGKILL);  // the rank ends with its launcher
    (void)p.wait(20);
    EXPECT_TRUE(left_behind("ZERO_RUN_ID=" + p.run_id(), 5).empty());
    const Inventory now = inventory_of(folder + "/ck");
    EXPECT_LE(now.whole, 4) << "loop " << loop << ", seed " << seed;
    EXPECT_LE(now.temporary, 1) << "loop " << loop << ", seed " << seed;
    most.whole = std::max(most.whole, now.whole);
    most.temporary = std::max(most.temporary, now.temporary);
    between += now.whole == 4;
  }
  TrainingJob last(1, {}, training + Words{folder + "/ck"}, folder);
  EXPECT_EQ(last.wait(100), 0) << last.err;
  EXPECT_TRUE(last.says("resumed from")) << last.err;
  std::printf(
      "%d kills inside saves: at most %d whole checkpoints and %d temporary; %d times killed between a commit "
      "and the removal of the oldest\n",
      loops, most.whole, most.temporary, between);
  EXPECT_LE(inventory_of(folder + "/ck").whole, 3);
  TrainingJob whole(1, {}, training + Words{other + "/ck"}, other);
  EXPECT_EQ(whole.wait(200), 0) << whole.err;
  EXPECT_EQ(digest_of(folder + "/ck", "global_step" + steps), digest_of(other + "/ck", "global_step" + steps));
}

}  // namespace
}  // namespace zero::test::elastic_train_test
