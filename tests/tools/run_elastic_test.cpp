// `zero run --restarts N --min-ranks M` with simulated ranks: what is left out, on how many ranks the job continues,
// what is said about it, and when it ends. Real training is in elastic_train_test.cpp.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/hosts.h"
#include "support/process.h"

namespace zero::test::run_elastic_test {
namespace {

using nlohmann::json;

const std::string kZero = ZERO_BINARY_DIR "/bin/zero";
const std::string kRank = ZERO_BINARY_DIR "/tests/rank_program";

struct Job : Process {
  Job(const Words& options, const Words& actions) : Process(Words{kZero, "run"} + options + Words{kRank} + actions) {}
  int finish(double limit = 40) {
    const int code = wait(limit);
    const std::size_t at = err.find(", run ");
    EXPECT_TRUE(at != std::string::npos && left_behind("ZERO_RUN_ID=" + err.substr(at + 6, 28), 0).empty()) << err;
    return code;
  }
  bool says(const std::string& text) const { return err.find(text) != std::string::npos; }
};

Words sorted(Words list) {
  std::sort(list.begin(), list.end());
  return list;
}

TEST(RunElastic, ASlotThatDiesTwiceIsLeftOut) {
  Job p({"-n", "4", "--restarts", "3", "--min-ranks", "2"},
        {"2:die-until=1,9", "sleep-in=0,60000", "sleep-in=1,60000", "env=WORLD_SIZE", "env=ZERO_PREVIOUS_WORLD",
         "env=ZERO_RESTART_COUNT", "env=LOCAL_RANK", "env=LOCAL_WORLD_SIZE"});
  EXPECT_EQ(p.finish(), 0) << p.err;
  EXPECT_TRUE(p.says("restart 1 of 3 in 1 s\n")) << p.err;
  EXPECT_TRUE(p.says("restart 2 of 3 on 3 ranks (was 4: slot 2 died twice) in 1 s\n")) << p.err;
  Words expected;
  for (const char* rank : {"0", "1", "2"}) {
    const std::string mark = std::string("[") + rank + "] ";
    for (const char* entry : {"WORLD_SIZE=3", "ZERO_PREVIOUS_WORLD=4", "ZERO_RESTART_COUNT=2", "LOCAL_WORLD_SIZE=3"})
      expected.push_back(mark + entry);
    expected.push_back(mark + "LOCAL_RANK=" + rank);
  }
  EXPECT_EQ(sorted(lines(p.out)), sorted(expected));
}

TEST(RunElastic, TheFirstAttemptHasNoPreviousWorld) {
  Job p({"-n", "1"}, {"env=ZERO_PREVIOUS_WORLD", "env=ZERO_RESTART_COUNT"});
  EXPECT_EQ(p.finish(), 0);
  EXPECT_EQ(p.out, "[0] ZERO_PREVIOUS_WORLD=(unset)\n[0] ZERO_RESTART_COUNT=0\n");
}

TEST(RunElastic, OnlyNumbersThatTheConfigurationAllows) {
  Job p({"-n", "4", "--restarts", "3", "--min-ranks", "2", "--json"},
        {"batch=8", "3:die-until=1,11", "sleep-in=0,60000", "sleep-in=1,60000", "env=WORLD_SIZE"});
  EXPECT_EQ(p.finish(), 0) << p.err;
  EXPECT_TRUE(p.says("restart 2 of 3 on 2 ranks (was 4: slot 3 died twice; the configuration does not allow 3) in 1 s"))
      << p.err;
  EXPECT_FALSE(p.says("train_batch_size is not set")) << p.err;
  const json document = json::parse(p.out);
  EXPECT_EQ(document["exit_code"], 0);
  EXPECT_EQ(document["ranks"], 2);
  EXPECT_EQ(document["attempts"], 3);
  EXPECT_EQ(document["restarts"], json::parse(R"([{"ranks": 4, "previous_ranks": 4, "left_out": null},
                            {"ranks": 2, "previous_ranks": 4, "left_out": "slot 3 died twice"}])"));
}

TEST(RunElastic, NoNumberThatFitsIsExitSixAndNamesThoseThatWould) {
  Job p({"-n", "4", "--restarts", "5", "--min-ranks", "3"}, {"batch=8", "3:die-until=9,9", "sleep=60000"});
  EXPECT_EQ(p.finish(), 6) << p.err;
  EXPECT_TRUE(
      p.says("error: no restart (slot 3 died twice): 3 of 4 ranks are left, expected at least 3 that the "
             "configuration allows: 1, 2 or 4 would do. Hint: --min-ranks 2"))
      << p.err;
  Job code({"-n", "2", "--restarts", "5", "--min-ranks", "2"}, {"1:exit=1", "sleep=60000"});
  EXPECT_EQ(code.finish(), 6) << code.err;
  EXPECT_TRUE(code.says("no restart (slot 1 died twice): 1 of 2 ranks are left, expected at least 2")) << code.err;
}

// Ranks that die before they have read the configuration: the next attempt finds out what it allows.
TEST(RunElastic, AProgramThatRefusesTheNumberIsStartedOnFewer) {
  Job p({"-n", "4", "--restarts", "4", "--min-ranks", "2"},
        {"3:die-until=1,9", "sleep-in=0,60000", "sleep-in=1,60000", "batch=4", "refuse-misfit=4", "env=WORLD_SIZE"});
  EXPECT_EQ(p.finish(), 0) << p.err;
  EXPECT_TRUE(p.says("restart 2 of 4 on 3 ranks (was 4: slot 3 died twice)")) << p.err;
  EXPECT_TRUE(p.says("restart 3 of 4 on 2 ranks (was 3: the configuration does not allow 3)")) << p.err;
  EXPECT_EQ(sorted(lines(p.out)), (Words{"[0] WORLD_SIZE=2", "[1] WORLD_SIZE=2"}));
  // Without the option, and in the first attempt, exit code 2 is final.
  Job first({"-n", "3", "--restarts", "4", "--min-ranks", "2"}, {"batch=4", "refuse-misfit=4"});
  EXPECT_EQ(first.finish(), 2) << first.err;
  EXPECT_FALSE(first.says("restart 1")) << first.err;
}

// Slot 2 in the first two attempts, then slot 1: four failures at one step, and a new set of ranks after two of them.
TEST(RunElastic, LeavingOutIsNoCrashLoop) {
  Job p({"-n", "3", "--restarts", "6", "--min-ranks", "1"},
        {"step=9", "2:die-until=1,9", "sleep-in=0,60000", "sleep-in=1,60000", "1:die-until=3,9", "sleep-in=2,60000",
         "sleep-in=3,60000"});
  EXPECT_EQ(p.finish(60), 0) << p.err;
  EXPECT_FALSE(p.says("without a new checkpoint")) << p.err;
  EXPECT_FALSE(p.says("train_batch_size")) << p.err;
  EXPECT_TRUE(p.says("restart 2 of 6 on 2 ranks (was 3: slot 2 died twice) in 1 s")) << p.err;
  EXPECT_TRUE(p.says("restart 4 of 6 on 1 rank (was 2: slot 1 died twice) in 1 s")) << p.err;
}

TEST(RunElastic, ThePauseBeginsAgainAfterACheckpoint) {
  Job q({"-n", "2", "--restarts", "2", "--min-ranks", "1"},
        {"batch=0", "1:die-until=1,9", "sleep-in=0,60000", "sleep-in=1,60000"});
  EXPECT_EQ(q.finish(), 0) << q.err;
  EXPECT_TRUE(q.says("warning: train_batch_size is not set: steps on another number of ranks")) << q.err;
  Job p({"-n", "1", "--restarts", "3"}, {"commit", "die-until=2,9"});
  EXPECT_EQ(p.finish(), 0) << p.err;
  for (const char* restart : {"restart 1 of 3 in 1 s", "restart 2 of 3 in 1 s", "restart 3 of 3 in 1 s"})
    EXPECT_TRUE(p.says(restart)) << p.err;
}

TEST(RunElastic, OptionsThatContradict) {
  const auto refused = [](const Words& options, const std::string& text) {
    const Ended p = run_to_end({Words{kZero, "run"} + options + Words{kRank}, {}, {}, -1});
    EXPECT_EQ(p.code, 2) << p.err;
    EXPECT_NE(p.err.find(text), std::string::npos) << p.err;
  };
  refused({"-n", "4", "--min-ranks", "2"}, "[--min-ranks] got no --restarts");
  refused({"-n", "4", "--min-hosts", "1"}, "[--min-hosts] got no --restarts");
  refused({"-n", "4", "--restarts", "1", "--min-ranks", "5"}, "[--min-ranks] got 5, expected at most the 4");
  refused({"-n", "4", "--restarts", "1", "--min-hosts", "2"}, "[--min-hosts] got 2, expected at most the 1");
  refused({"--nnodes", "2", "--node_rank", "0", "-n", "1", "--master_addr", "127.0.0.1", "--restarts", "1",
           "--min-ranks", "1"},
          "[--min-ranks] got --node-rank");
  refused({"-n", "1", "--restarts", "1", "--max-restarts", "2"}, "restarts");
}

struct HostsRun : HostsJob {
  HostsRun(const Words& options, const Words& actions, const Words& environment = {})
      : HostsJob("wa slots=2\nwb slots=2\nwc slots=1\n", options + Words{kRank} + actions, environment) {}
};

TEST(RunElastic, ALostHostIsLeftOutAtOnce) {
  HostsRun p({"--restarts", "2", "--min-ranks", "2", "--grace=1"},
             {"out=up", "sleep-in=0,60000", "env=WORLD_SIZE", "env=GROUP_RANK", "env=GROUP_WORLD_SIZE"});
  for (const char* rank : {"[wa:1] up", "[wb:3] up", "[wc:4] up"}) ASSERT_TRUE(p.wait_for(rank)) << p.err;
  kill(p.agent_on("wb"), SIGKILL);
  EXPECT_EQ(p.finish(), 0) << p.err;
  EXPECT_TRUE(p.says("restart 1 of 2 on 3 ranks (was 5: host wb lost) in 1 s")) << p.err;
  EXPECT_NE(p.out.find("[wc:2] GROUP_RANK=1\n"), std::string::npos) << p.out;  // the prefix has the new places
  EXPECT_NE(p.out.find("[wa:1] WORLD_SIZE=3\n"), std::string::npos) << p.out;
  EXPECT_NE(p.out.find("[wc:2] GROUP_WORLD_SIZE=2\n"), std::string::npos) << p.out;
}

TEST(RunElastic, WithoutTheFirstHostTheNextIsTheMeetingPlace) {
  HostsRun p({"--restarts", "1", "--min-hosts", "2", "--grace=1"},
             {"out=up", "sleep-in=0,60000", "env=MASTER_ADDR", "env=RANK"});
  for (const char* rank : {"[wa:1] up", "[wb:3] up", "[wc:4] up"}) ASSERT_TRUE(p.wait_for(rank)) << p.err;
  kill(-p.connection_to("wa"), SIGKILL);
  EXPECT_EQ(p.finish(), 0) << p.err;
  EXPECT_TRUE(p.says("restart 1 of 1 on 3 ranks (was 5: host wa lost)")) << p.err;
  EXPECT_NE(p.out.find("[wb:0] MASTER_ADDR=wb\n"), std::string::npos) << p.out;
  EXPECT_NE(p.out.find("[wc:2] MASTER_ADDR=wb\n"), std::string::npos) << p.out;
}

TEST(RunElastic, AHostThatCannotBeReachedAgainIsLostToo) {
  const std::string down = temporary_folder() + "/down";
  HostsRun p({"--restarts", "3", "--min-ranks", "1", "--grace=1"}, {"out=up", "sleep-in=0,60000", "env=WORLD_SIZE"},
             {"FAKE_SSH_DOWN=" + down});
  for (const char* rank : {"[wa:1] up", "[wb:3] up", "[wc:4] up"}) ASSERT_TRUE(p.wait_for(rank)) << p.err;
  std::ofstream(down) << "wc\nwb\n";
  kill(p.agent_on("wb"), SIGKILL);
  EXPECT_EQ(p.finish(), 0) << p.err;
  EXPECT_TRUE(p.says("restart 1 of 3 on 3 ranks (was 5: host wb lost)")) << p.err;
  EXPECT_TRUE(p.says("someone@wc: Permission denied")) << p.err;
  EXPECT_TRUE(p.says("restart 2 of 3 on 2 ranks (was 3: host wc lost)")) << p.err;
  EXPECT_NE(p.out.find("[wa:1] WORLD_SIZE=2\n"), std::string::npos) << p.out;
  // At the start it is an error as before: nothing has failed yet that a restart could leave out.
  HostsRun start({"--restarts", "3", "--min-ranks", "1"}, {"out=up"}, {"FAKE_SSH_REFUSE=wc"});
  EXPECT_EQ(start.wait(), 6) << start.err;
  EXPECT_FALSE(start.says("restart 1")) << start.err;
}

TEST(RunElastic, TooFewHostsEndTheJob) {
  HostsRun p({"--restarts", "3", "--min-hosts", "3", "--grace=1"}, {"out=up", "sleep=60000"});
  for (const char* rank : {"[wa:1] up", "[wb:3] up", "[wc:4] up"}) ASSERT_TRUE(p.wait_for(rank)) << p.err;
  kill(p.agent_on("wc"), SIGKILL);
  EXPECT_EQ(p.finish(), 6) << p.err;
  EXPECT_TRUE(p.says("no restart (host wc lost): 2 of 3 hosts are left, expected at least 3")) << p.err;
}

TEST(RunElastic, ASlotOfAnotherHost) {
  HostsRun p({"--restarts", "3", "--min-ranks", "4"},
             {"3:die-until=1,9", "sleep-in=0,60000", "sleep-in=1,60000", "env=LOCAL_WORLD_SIZE"});
  EXPECT_EQ(p.finish(), 0) << p.err;
  EXPECT_TRUE(p.says("restart 2 of 3 on 4 ranks (was 5: slot 1 of wb died twice) in 1 s")) << p.err;
  EXPECT_NE(p.out.find("[wb:2] LOCAL_WORLD_SIZE=1\n"), std::string::npos) << p.out;
  EXPECT_NE(p.out.find("[wc:3] LOCAL_WORLD_SIZE=1\n"), std::string::npos) << p.out;
}

}  // namespace
}  // namespace zero::test::run_elastic_test
