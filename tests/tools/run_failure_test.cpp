// `zero run` with failures: the rank that is named, the end of all others, no remaining processes, and signals. Every
// test searches for processes with the run's id. Ranks that must be killed sleep for a minute, longer than finish()
// waits.
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "support/file_text.h"
#include "support/process.h"

namespace zero::test::run_failure_test {
namespace {

const std::string kZero = ZERO_BINARY_DIR "/bin/zero";
const std::string kRank = ZERO_BINARY_DIR "/tests/rank_program";

// The run's id, from the launcher's first line.
std::string run_id(const Process& p) {
  const std::size_t at = p.err.find(", run ");
  return at == std::string::npos ? "" : p.err.substr(at + 6, 28);
}

struct Job : Process {
  Job(std::vector<std::string> options, std::vector<std::string> actions) : Process(arguments(options, actions)) {}
  static std::vector<std::string> arguments(const std::vector<std::string>& options,
                                            const std::vector<std::string>& actions) {
    std::vector<std::string> all{kZero, "run"};
    all.insert(all.end(), options.begin(), options.end());
    all.push_back(kRank);
    all.insert(all.end(), actions.begin(), actions.end());
    return all;
  }
  // Waits, and checks that nothing of the run is left.
  int finish(double limit = 30) {
    const int code = wait(limit);
    EXPECT_EQ(run_id(*this).size(), 28u) << err;
    EXPECT_TRUE(left_behind("ZERO_RUN_ID=" + run_id(*this), 0).empty()) << err;
    return code;
  }
  bool says(const std::string& text) const { return err.find(text) != std::string::npos; }
};

TEST(RunFailure, FirstExitCodeIsPassedOn) {
  Job p({"-n", "4"}, {"2:sleep=100", "2:exit=3", "sleep=60000"});
  EXPECT_EQ(p.finish(), 3);
  EXPECT_TRUE(p.says("zero run: FAILED (exit 3)  run " + run_id(p))) << p.err;
  EXPECT_TRUE(p.says("root cause   rank 2 of 4, host ")) << p.err;
  EXPECT_TRUE(p.says(": exit code 3\n")) << p.err;
  EXPECT_TRUE(p.says("collateral   ranks 0 1 3 were stopped")) << p.err;
}

TEST(RunFailure, SignalsAreNamedAndAreExitSix) {
  for (const auto& [number, name] :
       std::vector<std::pair<int, std::string>>{{SIGKILL, "SIGKILL"}, {SIGSEGV, "SIGSEGV"}, {SIGTERM, "SIGTERM"}}) {
    Job p({"-n", "3"}, {"1:sleep=100", "1:kill=" + std::to_string(number), "sleep=60000"});
    EXPECT_EQ(p.finish(), 6);
    EXPECT_TRUE(p.says("rank 1 of 3")) << p.err;
    EXPECT_TRUE(p.says("killed by signal " + std::to_string(number) + " (" + name + ")")) << p.err;
    EXPECT_FALSE(p.says("memory ran out")) << p.err;
  }
}

TEST(RunFailure, StubbornRanksAndTheirChildrenAreGoneAfterTheGrace) {
  Job p({"-n", "4", "--grace", "0.5"},
        {"ignore=15", "ignore=2", "child", "daemon", "0:sleep=300", "0:exit=9", "sleep=60000"});
  EXPECT_EQ(p.finish(), 9);
  EXPECT_GE(p.seconds, 0.5);
}

TEST(RunFailure, GrandchildrenDoNotOutliveASuccess) {
  Job p({"-n", "2"}, {"child", "daemon", "out=done"});
  EXPECT_EQ(p.finish(), 0);
}

// What an entrypoint started before `exec zero run`: `sleeper` at once, and a process whose parent ends later, so that
// it becomes a child of the launcher.
class Strangers {
 public:
  // `zero run <words>` after both. The names of their files are in the folder.
  explicit Strangers(const std::string& words)
      : job(Process::Settings{{"/bin/sh", "-c",
                               "sleep 600 >log 2>&1 & echo $! > first\n"
                               "(sleep 600 >log 2>&1 & echo $! > second; sleep 0.3) >log 2>&1 &\n"
                               "while [ ! -s first ] || [ ! -s second ]; do sleep 0.01; done\n"
                               "exec " +
                                   kZero + " run " + words},
                              {},
                              folder_,
                              -1}) {}
  ~Strangers() {
    for (const char* name : {"first", "second"})
      if (const pid_t pid = of(name); pid > 0) kill(pid, SIGKILL);
  }
  pid_t of(const std::string& name) const { return std::atoi(file_text(folder_ + "/" + name).c_str()); }
  // A process that is not a zombie.
  bool runs(const std::string& name) const {
    const std::string stat = file_text("/proc/" + std::to_string(of(name)) + "/stat");
    return !stat.empty() && stat.find(") Z ") == std::string::npos;
  }

 private:
  const std::string folder_ = temporary_folder();

 public:
  Process job;
};

TEST(RunFailure, WhatRanBeforeTheLauncherIsLeftAlone) {
  Strangers good("-n 2 " + kRank + " child daemon sleep=600 out=done");
  EXPECT_EQ(good.job.wait(), 0) << good.job.err;
  EXPECT_TRUE(left_behind("ZERO_RUN_ID=" + run_id(good.job), 0).empty()) << "descendants of ranks end";
  EXPECT_TRUE(good.runs("first"));
  EXPECT_TRUE(good.runs("second")) << "an orphan of such a process";

  Strangers bad("-n 2 --restarts 1 " + kRank + " child daemon 1:kill=9 sleep=60000");
  EXPECT_EQ(bad.job.wait(), 6) << bad.job.err;
  EXPECT_NE(bad.job.err.find("restart 1 of 1"), std::string::npos) << bad.job.err;
  EXPECT_TRUE(left_behind("ZERO_RUN_ID=" + run_id(bad.job), 0).empty());
  EXPECT_TRUE(left_behind("ZERO_RUN_ID=" + run_id(bad.job) + ".r1", 0).empty());
  EXPECT_TRUE(bad.runs("first"));
  EXPECT_TRUE(bad.runs("second"));
}

// A descendant without the run's marks, in a session of its own.
TEST(RunFailure, ADaemonWithoutItsEnvironmentDoesNotOutliveTheRun) {
  const std::string folder = temporary_folder();
  Process p(Process::Settings{{kZero, "run", "-n", "1", "/bin/sh", "-c",
                               "env -i setsid sh -c 'echo $$ > daemon; exec sleep 600' & "
                               "while [ ! -s daemon ]; do sleep 0.01; done"},
                              {},
                              folder,
                              -1});
  EXPECT_EQ(p.wait(), 0) << p.err;
  const std::string daemon = file_text(folder + "/daemon");
  ASSERT_FALSE(daemon.empty());
  EXPECT_FALSE(std::filesystem::exists("/proc/" + daemon.substr(0, daemon.find('\n')))) << daemon;
}

TEST(RunFailure, OrderOfDeathNotOfForking) {
  // The later rank dies first, each time; all are dead within milliseconds.
  for (int round = 0; round < 20; ++round) {
    std::vector<std::string> actions{"wait-for-failure"};
    const int culprit = 7 - round % 8;
    actions.insert(actions.begin(), std::to_string(culprit) + ":exit=" + std::to_string(20 + culprit));
    actions.push_back("exit=19");
    Job p({"-n", "8"}, actions);
    EXPECT_EQ(p.finish(), 20 + culprit) << p.err;
    EXPECT_LE(p.seconds, 5);  // since the start
    EXPECT_TRUE(p.says("root cause   rank " + std::to_string(culprit) + " of 8")) << p.err;
  }
}

TEST(RunFailure, RanksThatLostTheirPeerAreCollateral) {
  // Ranks 0 and 1 end first because they lost their peer; rank 2 is the root cause.
  Job p({"-n", "3"}, {"0:exit=6", "1:exit=6", "2:sleep=300", "2:exit=7"});
  EXPECT_EQ(p.finish(), 7);
  EXPECT_TRUE(p.says("rank 2 of 3")) << p.err;
  EXPECT_TRUE(p.says("ranks 0 1 lost their peer")) << p.err;
  Job all({"-n", "3"}, {"1:exit=6", "sleep=200", "exit=6"});
  EXPECT_EQ(all.finish(), 6);
  EXPECT_TRUE(all.says("root cause   rank 1 of 3")) << all.err;
}

TEST(RunFailure, BlockTellsWhatThePageSays) {
  const std::string folder = temporary_folder();
  // These ranks ignore SIGTERM, so that they end by their own error, independent of scheduling.
  Job p({"-n", "4", "--log-dir", folder},
        {"ignore=15", "step=217", "phase=4", "unit=layers.7", "0:inside=8812", "1:inside=8812", "2:inside=8812",
         "3:sleep=300", "3:err=the last words", "3:kill=9", "wait-for-failure", "exit=6"});
  EXPECT_EQ(p.finish(), 6);
  const std::string block = p.err.substr(p.err.find("zero run: FAILED"));
  EXPECT_NE(block.find("rank 3 of 4"), std::string::npos) << p.err;
  EXPECT_NE(block.find("where        step 217, micro-batch 2, backward, unit layers.7, "), std::string::npos) << p.err;
  EXPECT_NE(block.find("collective   reduce_scatter #8812, bf16, 1048576 elements: ranks 0 1 2 inside, rank 3 not"),
            std::string::npos)
      << p.err;
  EXPECT_NE(block.find("collateral   ranks 0 1 2 lost their peer"), std::string::npos) << p.err;
  EXPECT_NE(block.find("log          " + folder + "/" + run_id(p) + "/rank-3.err (last 1 lines above)"),
            std::string::npos)
      << p.err;
  EXPECT_TRUE(p.says("--- last lines of rank 3 ---\nthe last words\n---\nzero run: FAILED")) << p.err;
}

TEST(RunFailure, ErrorTextOfThePage) {
  Job p({"-n", "2"}, {"step=5", "1:error=[Engine::step] got NaN", "1:exit=7", "sleep=60000"});
  EXPECT_EQ(p.finish(), 7);
  EXPECT_TRUE(p.says("exit code 7 (numerical failure)")) << p.err;
  EXPECT_TRUE(p.says("error        [Engine::step] got NaN")) << p.err;
}

TEST(RunFailure, HangNamesTheRankThatIsNotInside) {
  const std::string folder = temporary_folder();
  Job p({"-n", "3", "--hang-timeout", "1", "--log-dir", folder},
        {"step=4", "0:inside=11", "2:inside=11", "sleep=60000"});
  EXPECT_EQ(p.finish(), 6);
  EXPECT_TRUE(p.says("root cause   rank 1 of 3")) << p.err;
  EXPECT_TRUE(p.says("no progress for 1 s")) << p.err;
  EXPECT_TRUE(p.says("ranks 0 2 inside, rank 1 not")) << p.err;
  EXPECT_TRUE(p.says("step 4")) << p.err;
  EXPECT_TRUE(std::filesystem::exists(folder + "/" + run_id(p) + "/rank-0.collectives"));
}

TEST(RunFailure, HangOfAStoppedProcess) {
  Job p({"-n", "2", "--hang-timeout", "1", "--grace", "0.5"}, {"step=1", "1:kill=19", "0:inside=0", "0:sleep=60000"});
  EXPECT_EQ(p.finish(), 6);
  EXPECT_TRUE(p.says("rank 1 of 2")) << p.err;
  EXPECT_TRUE(p.says("the process is stopped")) << p.err;
  // Without information about collectives, after the other ranks were idle.
  Job late({"-n", "3", "--hang-timeout", "1", "--grace", "0.5"},
           {"step=1", "2:sleep=400", "2:step=2", "2:kill=19", "sleep=60000"});
  EXPECT_EQ(late.finish(), 6);
  EXPECT_TRUE(late.says("root cause   rank 2 of 3")) << late.err;
  EXPECT_TRUE(late.says("the process is stopped")) << late.err;
}

TEST(RunFailure, SlowButMovingIsNoHang) {
  Job p({"-n", "2", "--hang-timeout", "0.5"}, {"step=0", "0:inside=1", "0:sleep=1500", "0:after=1", "1:progress=80"});
  EXPECT_EQ(p.finish(), 0) << p.err;
  // A save, and a program without a status page, may be idle for longer.
  Job save({"-n", "2", "--hang-timeout", "0.3"}, {"phase=7", "sleep=1200"});
  EXPECT_EQ(save.finish(), 0) << save.err;
  Job foreign({"-n", "2", "--hang-timeout", "0.3"}, {"sleep=1200"});
  EXPECT_EQ(foreign.finish(), 0) << foreign.err;
}

TEST(RunFailure, InterruptDoesNotWaitForTheGrace) {
  Job polite({"-n", "3"}, {"out=up", "sleep=60000"});
  ASSERT_TRUE(polite.wait_for("[2] up"));
  polite.signal(SIGINT);
  EXPECT_EQ(polite.finish(), 130);
  EXPECT_FALSE(polite.says("FAILED")) << polite.err;

  Job deaf({"-n", "3", "--grace", "600"}, {"ignore=2", "ignore=15", "child", "out=up", "sleep=60000"});
  ASSERT_TRUE(deaf.wait_for("[2] up"));
  deaf.signal(SIGINT);
  EXPECT_EQ(deaf.finish(), 130);
  EXPECT_GE(deaf.seconds, 0.9) << "ranks get time to end by themselves";
}

// The terminal signals its foreground process group, which is the launcher's; the launcher notifies the ranks once.
TEST(RunFailure, ControlCOnATerminal) {
  int terminal = -1;
  const std::vector<std::string> words =
      Job::arguments({"-n", "3"}, {"handle=2,-1", "out=up", "sleep=60000", "out=told"});
  std::vector<char*> argv;
  for (const std::string& w : words) argv.push_back(const_cast<char*>(w.c_str()));
  argv.push_back(nullptr);
  const pid_t pid = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (pid == 0) {
    execv(argv[0], argv.data());
    _exit(127);
  }
  std::string shown;
  const auto until = [&](const std::string& text, int times, double limit) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit);
    while (std::chrono::steady_clock::now() < end) {
      int seen = 0;
      for (std::size_t at = shown.find(text); at != std::string::npos; at = shown.find(text, at + 1)) ++seen;
      if (seen >= times) return true;
      pollfd ready{terminal, POLLIN, 0};
      if (poll(&ready, 1, 50) <= 0) continue;
      char bytes[4096];
      const ssize_t n = read(terminal, bytes, sizeof bytes);
      if (n <= 0) return false;
      shown.append(bytes, static_cast<std::size_t>(n));
    }
    return false;
  };
  EXPECT_TRUE(until("] up", 3, 20)) << shown;
  EXPECT_EQ(write(terminal, "\003", 1), 1);
  EXPECT_TRUE(until("] told", 3, 20)) << shown;
  until("nothing more", 1, 30);  // to the end
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 130) << status;
  EXPECT_NE(shown.find("zero run: interrupted"), std::string::npos) << shown;
  EXPECT_EQ(shown.find("FAILED"), std::string::npos) << shown;
  close(terminal);
}

TEST(RunFailure, PeerLossUnderAnotherCodeIsCollateral) {
  // The error on the status page counts, not how the program ends afterwards.
  Job p({"-n", "3"}, {"0:lost", "0:exit=1", "1:lost", "1:kill=6", "2:sleep=300", "2:exit=9"});
  EXPECT_EQ(p.finish(), 9) << p.err;
  EXPECT_TRUE(p.says("root cause   rank 2 of 3")) << p.err;
  EXPECT_TRUE(p.says("ranks 0 1 lost their peer")) << p.err;
}

TEST(RunFailure, ARankThatEndsTooEarlyIsNamed) {
  Job p({"-n", "3", "--hang-timeout", "1"},
        {"step=4", "1:inside=10", "1:after=10", "1:exit=0", "inside=11", "sleep=60000"});
  EXPECT_EQ(p.finish(), 6);
  EXPECT_TRUE(p.says("root cause   rank 1 of 3")) << p.err;
  EXPECT_TRUE(p.says("it ended with exit code 0 while the others wait for it")) << p.err;
  EXPECT_TRUE(p.says("ranks 0 2 inside, rank 1 not")) << p.err;
}

// The second interrupt kills ranks that ignore all signals; the first was reported before it.
TEST(RunFailure, SecondInterruptKillsAtOnce) {
  Job p({"-n", "3"}, {"ignore=2", "ignore=15", "out=up", "sleep=60000"});
  for (const char* rank : {"0", "1", "2"}) ASSERT_TRUE(p.wait_for(std::string("[") + rank + "] up"));
  p.signal(SIGINT);
  ASSERT_TRUE(p.wait_for("interrupted"));
  p.signal(SIGINT);
  EXPECT_EQ(p.finish(), 130);
}

TEST(RunFailure, InterruptWhileNobodyReadsOurOutput) {
  Job p({"-n", "2"}, {"err=up", "lines=2000000", "sleep=60000"});
  ASSERT_TRUE(p.wait_for("up"));
  // Until the pipe is full, and then until it has become a zombie. Nothing is read on purpose.
  const auto state = [&](const char* wanted) {
    return file_text("/proc/" + std::to_string(p.pid()) + "/stat").find(std::string(") ") + wanted + " ") !=
           std::string::npos;
  };
  bool ended = false;
  // Full: more than half of its pages, which writes may fill only in part, and no growth for 0.3 s.
  int still = 0;
  for (auto [tries, before] = std::pair{0, p.unread_out()}; tries < 3000 && still < 30; ++tries) {
    usleep(10000);
    const auto now = p.unread_out();
    still = now == std::exchange(before, now) && now > 32768 ? still + 1 : 0;
  }
  ASSERT_EQ(still, 30) << p.unread_out();
  p.signal(SIGINT);
  for (int tries = 0; tries < 3000 && !(ended = state("Z")); ++tries) usleep(10000);
  EXPECT_TRUE(ended) << "it waits for a reader";
  EXPECT_EQ(p.finish(), 130);
}

TEST(RunFailure, TerminateForwardsAndPassesTheSaveOn) {
  for (const int number : {SIGTERM, SIGUSR1}) {
    Job saved({"-n", "3"}, {"handle=" + std::to_string(number) + ",75", "out=up", "sleep=60000"});
    for (const char* rank : {"0", "1", "2"}) ASSERT_TRUE(saved.wait_for(std::string("[") + rank + "] up"));
    saved.signal(number);
    EXPECT_EQ(saved.finish(), 75) << saved.err;
  }
  Job unsaved({"-n", "3"}, {"out=up", "sleep=60000"});
  ASSERT_TRUE(unsaved.wait_for("[2] up"));
  unsaved.signal(SIGTERM);
  EXPECT_EQ(unsaved.finish(), 143) << unsaved.err;
  EXPECT_FALSE(unsaved.says("FAILED")) << unsaved.err;
  // One rank did not save, so there is no need to wait for the others.
  Job mixed({"-n", "2", "--grace", "0.3"}, {"0:ignore=15", "out=up", "sleep=60000"});
  for (const char* rank : {"0", "1"}) ASSERT_TRUE(mixed.wait_for(std::string("[") + rank + "] up"));
  mixed.signal(SIGTERM);
  EXPECT_EQ(mixed.finish(), 143);
}

TEST(RunFailure, TerminateEndsAfterTheStopTimeoutOrASecondOne) {
  Job slow({"-n", "2", "--stop-timeout", "0.5"}, {"ignore=15", "out=up", "sleep=60000"});
  for (const char* rank : {"0", "1"}) ASSERT_TRUE(slow.wait_for(std::string("[") + rank + "] up"));
  slow.signal(SIGTERM);
  EXPECT_EQ(slow.finish(), 143);
  EXPECT_GE(slow.seconds, 0.5);
  Job twice({"-n", "2"}, {"ignore=15", "out=up", "sleep=60000"});
  for (const char* rank : {"0", "1"}) ASSERT_TRUE(twice.wait_for(std::string("[") + rank + "] up"));
  twice.signal(SIGTERM);
  ASSERT_TRUE(twice.wait_for("s to save and stop"));
  twice.signal(SIGTERM);
  EXPECT_EQ(twice.finish(), 143);
}

TEST(RunFailure, RanksThatAgreeToStopByThemselves) {
  Job p({"-n", "2"}, {"0:exit=75", "1:sleep=400", "exit=75"});
  EXPECT_EQ(p.finish(), 75) << p.err;
  EXPECT_FALSE(p.says("FAILED"));
}

TEST(RunFailure, KilledLauncherLeavesNothing) {
  Job p({"-n", "4"}, {"ignore=15", "ignore=2", "ignore=1", "child", "daemon", "out=up", "sleep=60000"});
  for (const char* rank : {"0", "1", "2", "3"}) ASSERT_TRUE(p.wait_for(std::string("[") + rank + "] up"));
  const std::string entry = "ZERO_RUN_ID=" + run_id(p);
  std::size_t found = 0;  // one look may miss a daemon that is just changing parents
  for (int tries = 0; tries < 500 && found < 12; ++tries) {
    found = std::max(found, with_environment(entry).size());
    usleep(10000);
  }
  EXPECT_GE(found, 12u) << "ranks, their children and daemons";
  p.signal(SIGKILL);
  EXPECT_EQ(p.wait(), 1000 + SIGKILL);
  EXPECT_TRUE(left_behind(entry).empty());
}

TEST(RunFailure, RestartsAllRanksUntilTheyDo) {
  const std::string folder = temporary_folder();
  Job p({"-n", "2", "--max-restarts", "3", "--log-dir", folder + "/logs"},
        {"1:first-time=" + folder + "/mark,6", "env=ZERO_RESTART_COUNT", "env=ZERO_RUN_ID", "sleep=100"});
  EXPECT_EQ(p.finish(), 0) << p.err;
  EXPECT_TRUE(p.says("zero run: FAILED (exit 6)")) << p.err;
  EXPECT_TRUE(p.says("restart 1 of 3 in 1 s")) << p.err;
  EXPECT_NE(p.out.find("[1] ZERO_RESTART_COUNT=1\n"), std::string::npos) << p.out;
  EXPECT_NE(p.out.find("[1] ZERO_RUN_ID=" + run_id(p) + ".r1\n"), std::string::npos) << p.out;
  EXPECT_TRUE(std::filesystem::exists(folder + "/logs/" + run_id(p) + "/rank-1.out"));
  EXPECT_TRUE(std::filesystem::exists(folder + "/logs/" + run_id(p) + ".r1/rank-1.out"));
}

TEST(RunFailure, RestartsAreLimitedAndNotForEveryCode) {
  Job spent({"-n", "2", "--max-restarts", "1"}, {"1:kill=9", "sleep=60000"});
  EXPECT_EQ(spent.finish(), 6);
  std::size_t blocks = 0;
  for (const std::string& line : lines(spent.err)) blocks += line.find("zero run: FAILED") == 0;
  EXPECT_EQ(blocks, 2u) << spent.err;
  Job usage({"-n", "2", "--max-restarts", "3"}, {"step=1", "exit=2"});
  EXPECT_EQ(usage.finish(), 2);
  EXPECT_FALSE(usage.says("restart 1")) << usage.err;
  EXPECT_TRUE(usage.says("zero run: warning: not restarted: exit code 2 means a wrong command line or configuration\n"))
      << usage.err;
  Job once({"-n", "2"}, {"exit=2"});
  EXPECT_EQ(once.finish(), 2);
  EXPECT_FALSE(once.says("not restarted")) << once.err;
  for (const std::string code : {"2", "3", "4", "7"}) {  // of a program that does not know libzero
    Process other({kZero, "run", "-n", "1", "--restarts", "2", "/bin/sh", "-c", "exit " + code});
    EXPECT_EQ(other.wait(), std::stoi(code));
    EXPECT_NE(other.err.find("not restarted: exit code " + code + " means "), std::string::npos) << other.err;
    EXPECT_NE(other.err.find("for programs of libzero, which this one is not"), std::string::npos) << other.err;
  }
}

TEST(RunFailure, CrashLoopsStop) {
  Job p({"-n", "2", "--max-restarts", "5"}, {"step=9", "1:kill=9", "sleep=60000"});
  EXPECT_EQ(p.finish(), 6);
  EXPECT_TRUE(p.says("two failures in a row at step 9 without a new checkpoint")) << p.err;
  EXPECT_FALSE(p.says("restart 2 of 5")) << p.err;
}

TEST(RunFailure, InterruptDuringTheBackOff) {
  Job p({"-n", "1", "--max-restarts", "50"}, {"exit=6"});
  ASSERT_TRUE(p.wait_for("restart 2 of 50"));
  p.signal(SIGINT);
  EXPECT_EQ(p.finish(), 130);
  EXPECT_FALSE(p.says("restart 3 of 50")) << p.err;
}

TEST(RunFailure, JsonHasTheSameFields) {
  Job p({"-n", "2", "--json"}, {"step=3", "1:err=\\\"quoted\\\"", "1:exit=5", "sleep=60000"});
  EXPECT_EQ(p.finish(), 5);
  ASSERT_EQ(lines(p.out).size(), 1u) << p.out;
  for (const char* part :
       {"\"schema\": \"zero.run/1\"", "\"exit_code\": 5", "\"root_cause\": {\"rank\": 1, \"ranks\": 2",
        "\"rank_exit_code\": 5", "\"where\": {\"time\": ", "\"step\": 3", "\"stopped\": [0]",
        "\"last_lines\": [\"\\\"quoted\\\"\"]"})
    EXPECT_NE(p.out.find(part), std::string::npos) << part << "\n" << p.out;
}

}  // namespace
}  // namespace zero::test::run_failure_test
