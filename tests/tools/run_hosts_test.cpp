// `zero run` on several hosts. The others are this machine under another name, reached through tests/tools/fake_ssh.
// Tests with separate networks are in run_network_test.cpp.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "support/file_text.h"
#include "support/hosts.h"
#include "support/process.h"

namespace zero::test::run_hosts_test {
namespace {

using Words = std::vector<std::string>;

const std::string kRank = ZERO_BINARY_DIR "/tests/rank_program";

Words sorted(Words list) {
  std::sort(list.begin(), list.end());
  return list;
}

// The output of one rank, without the prefix; ranks write concurrently.
std::string said_by(int rank, const std::string& out) {
  const std::string mark = ":" + std::to_string(rank) + "] ";
  std::string text;
  for (const std::string& line : lines(out))
    if (const std::size_t at = line.find(mark); at != std::string::npos && line[0] == '[')
      text += line.substr(at + mark.size()) + "\n";
  return text;
}

struct Job : HostsJob {
  Job(const Words& options, const Words& actions, const Words& environment = {},
      const std::string& hosts = "wa slots=2\nwb slots=2\n")
      : HostsJob(hosts, options + Words{kRank} + actions, environment) {}
  // All ranks have printed it.
  bool all_say(const std::string& text, double seconds = 20) {
    for (const char* rank : {"[wa:0] ", "[wa:1] ", "[wb:2] ", "[wb:3] "})
      if (!wait_for(rank + text, seconds)) return false;
    return true;
  }
};

TEST(RunHosts, RanksAreNumberedHostByHost) {
  Job p({}, {"env=RANK", "env=LOCAL_RANK", "env=GROUP_RANK", "env=CROSS_RANK", "env=FAKE_SSH_HOST"}, {},
        "wb slots=1\nwa slots=3\n");
  EXPECT_EQ(p.finish(), 0) << p.err;
  EXPECT_EQ(sorted(lines(p.out)),
            sorted({"[wb:0] RANK=0",           "[wb:0] LOCAL_RANK=0",     "[wb:0] GROUP_RANK=0",
                    "[wb:0] CROSS_RANK=0",     "[wb:0] FAKE_SSH_HOST=wb", "[wa:1] RANK=1",
                    "[wa:1] LOCAL_RANK=0",     "[wa:1] GROUP_RANK=1",     "[wa:1] CROSS_RANK=1",
                    "[wa:1] FAKE_SSH_HOST=wa", "[wa:2] RANK=2",           "[wa:2] LOCAL_RANK=1",
                    "[wa:2] GROUP_RANK=1",     "[wa:2] CROSS_RANK=1",     "[wa:2] FAKE_SSH_HOST=wa",
                    "[wa:3] RANK=3",           "[wa:3] LOCAL_RANK=2",     "[wa:3] GROUP_RANK=1",
                    "[wa:3] CROSS_RANK=1",     "[wa:3] FAKE_SSH_HOST=wa"}));
  EXPECT_TRUE(p.says("ranks: 4 on 2 hosts (wb, wa) from " + p.hostfile + ", meeting at wb:29500, run ")) << p.err;
}

TEST(RunHosts, AUserOfTheHostfileReachesSsh) {
  const std::string log = temporary_folder() + "/ssh";
  Job p({}, {"env=MASTER_ADDR"}, {"FAKE_SSH_LOG=" + log}, "ann@wa slots=1\nwb slots=1\n");
  EXPECT_EQ(p.finish(), 0) << p.err;
  EXPECT_EQ(sorted(lines(p.out)), sorted({"[wa:0] MASTER_ADDR=wa", "[wb:1] MASTER_ADDR=wa"}));
  EXPECT_NE(file_text(log).find("\n-l\nann\n--\nwa\n"), std::string::npos) << file_text(log);
  Job srun({"--launcher", "srun"}, {"out=up"}, {}, "ann@wa slots=1\nwb slots=1\n");
  EXPECT_EQ(srun.wait(), 2) << srun.err;
  EXPECT_TRUE(srun.says("[--hostfile] got user ann of wa with --launcher srun, expected ssh or no user")) << srun.err;
  Job here({}, {"out=up"}, {}, "nobody-here@localhost slots=1\nwb slots=1\n");
  EXPECT_EQ(here.wait(), 2) << here.err;
}

TEST(RunHosts, TheSameOnAllAndOnlyWhatIsMeantForOthers) {
  const std::string folder = temporary_folder();
  std::ofstream(folder + "/vars") << "FROM_FILE=a b='c'\n";
  Words actions;
  const Words names{"WORLD_SIZE",      "LOCAL_WORLD_SIZE",     "GROUP_WORLD_SIZE", "CROSS_SIZE",      "MASTER_ADDR",
                    "MASTER_PORT",     "NCCL_DEBUG",           "GLOO_X",           "OMP_NUM_THREADS", "UCX_Y",
                    "CUDA_CACHE_PATH", "CUDA_VISIBLE_DEVICES", "ZERO_TIMEOUT_S",   "EXPORTED",        "PRIVATE",
                    "FROM_FILE",       "ZERO_TOKEN",           "ZERO_RUN_ID",      "RANK_X"};
  for (const std::string& name : names) actions.push_back("env=" + name);
  Job p({"--export", "EXPORTED", "--env-file", folder + "/vars", "--master_port", "4711", "--master_addr=10.1.2.3"},
        actions,
        {"NCCL_DEBUG=a $b 'c' \"d\"\n;e", "GLOO_X=", "OMP_NUM_THREADS=3", "UCX_Y=y", "CUDA_CACHE_PATH=/c",
         "CUDA_VISIBLE_DEVICES=", "ZERO_TIMEOUT_S=77", "EXPORTED=e", "PRIVATE=p", "ZERO_TOKEN=a-secret-of-ours",
         "FAKE_SSH_LOG=" + folder + "/log"});
  EXPECT_EQ(p.finish(), 0) << p.err;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(said_by(rank, p.out),
              "WORLD_SIZE=4\nLOCAL_WORLD_SIZE=2\nGROUP_WORLD_SIZE=2\nCROSS_SIZE=2\nMASTER_ADDR=10.1.2.3\nMASTER_PORT="
              "4711\nNCCL_DEBUG=a $b 'c' \"d\"\n;e\n"
              "GLOO_X=\nOMP_NUM_THREADS=3\nUCX_Y=y\nCUDA_CACHE_PATH=/"
              "c\nCUDA_VISIBLE_DEVICES=(unset)\nZERO_TIMEOUT_S=77\nEXPORTED=e\nPRIVATE=(unset)\n"
              "FROM_FILE=a b='c'\nZERO_TOKEN=a-secret-of-ours\nZERO_RUN_ID=" +
                  p.run_id() + "\nRANK_X=(unset)\n");
  }
  const std::string calls = file_text(folder + "/log");
  EXPECT_NE(calls.find("\nwb\n" ZERO_BINARY_DIR "/bin/zero run --agent\n"), std::string::npos) << calls;
  for (const char* hidden : {"secret", "4711", "rank_program"})
    EXPECT_EQ(calls.find(hidden), std::string::npos) << "only the agent is named on a command line";
}

TEST(RunHosts, DeepSpeedsCommandLineOnEveryHost) {
  const std::string python = temporary_folder() + "/python";
  std::ofstream(python) << "#!/bin/sh\necho \"$FAKE_SSH_HOST $PYTHONPATH $*\"\n";
  std::filesystem::permissions(python, std::filesystem::perms::owner_all);
  // This host has no ranks: it needs neither the package nor the script.
  HostsJob p("wa slots=1\nwb slots=1\n", {"--deepspeed", "--no_local_rank", "not-here.py", "--steps", "3"},
             {"ZERO_PYTHON=" + python, "PYTHONPATH=/a:/b"});
  EXPECT_EQ(p.finish(), 0) << p.err;
  EXPECT_EQ(sorted(lines(p.out)),
            (Words{"[wa:0] wa /a:/b -u -m libzero.deepspeed.run --no_local_rank not-here.py --steps 3",
                   "[wb:1] wb /a:/b -u -m libzero.deepspeed.run --no_local_rank not-here.py --steps 3"}));
}

TEST(RunHosts, ATokenIsMadeForAllHosts) {
  Job p({}, {"env=ZERO_TOKEN"}, {"ZERO_TOKEN"});
  EXPECT_EQ(p.finish(), 0);
  std::set<std::string> tokens;
  for (const std::string& line : lines(p.out)) tokens.insert(line.substr(line.find('=')));
  ASSERT_EQ(tokens.size(), 1u) << p.out;
  EXPECT_EQ(tokens.begin()->size(), 65u);
}

TEST(RunHosts, ThisHostAmongOthers) {
  const std::string folder = temporary_folder();
  Job p({"--master-addr", "127.0.0.1", "--log-dir", folder},
        {"out=to out", "err=to err", "child", "daemon", "env=ZERO_LOG_DIR"}, {}, "wa slots=1\nlocalhost slots=2\n");
  EXPECT_EQ(p.finish(), 0) << p.err;
  const std::string logs = folder + "/" + p.run_id();
  EXPECT_EQ(sorted(lines(p.out)),
            sorted({"[wa:0] to out", "[localhost:1] to out", "[localhost:2] to out", "[wa:0] ZERO_LOG_DIR=" + logs,
                    "[localhost:1] ZERO_LOG_DIR=" + logs, "[localhost:2] ZERO_LOG_DIR=" + logs}));
  EXPECT_EQ(sorted(lines(p.err, "zero run:")),
            sorted({"[wa:0] to err", "[localhost:1] to err", "[localhost:2] to err"}));
  for (const char* rank : {"0", "1", "2"}) {
    EXPECT_EQ(file_text(logs + "/rank-" + rank + ".out"), "to out\nZERO_LOG_DIR=" + logs + "\n");
    EXPECT_EQ(file_text(logs + "/rank-" + rank + ".err"), "to err\n");
  }
}

TEST(RunHosts, FiltersAndNumbers) {
  Job filtered({"-i", "wb:1@wa:0"}, {"env=RANK"});
  EXPECT_EQ(filtered.finish(), 0);
  EXPECT_EQ(sorted(lines(filtered.out)), (Words{"[wa:0] RANK=0", "[wb:1] RANK=1"}));
  Job fewer({"-n", "1"}, {"env=WORLD_SIZE"});
  EXPECT_EQ(fewer.finish(), 0);
  EXPECT_EQ(sorted(lines(fewer.out)), (Words{"[wa:0] WORLD_SIZE=2", "[wb:1] WORLD_SIZE=2"}));
  Job one({"--num_nodes", "1"}, {"env=WORLD_SIZE"});
  EXPECT_EQ(one.finish(), 0);
  EXPECT_EQ(sorted(lines(one.out)), (Words{"[0] WORLD_SIZE=2", "[1] WORLD_SIZE=2"})) << "one host needs no name";
}

TEST(RunHosts, TheWorkingFolderIsTheSame) {
  const std::string folder = std::filesystem::canonical(temporary_folder());
  Process::Settings settings;
  settings.folder = folder;
  std::ofstream(folder + "/hosts") << "wa slots=1\nwb slots=1\n";
  settings.arguments = {ZERO_BINARY_DIR "/bin/zero", "run", "-H", "hosts", "sh", "-c", "pwd"};
  settings.environment = fake_ssh_environment("folder");
  Process p(settings);
  EXPECT_EQ(p.wait(), 0) << p.err;
  EXPECT_EQ(sorted(lines(p.out)), (Words{"[wa:0] " + folder, "[wb:1] " + folder}));
}

TEST(RunHosts, ManyLinesStayWholeAndInOrder) {
  Job p({}, {"lines=20000", "long=200000"});
  EXPECT_EQ(p.finish(60), 0);
  std::vector<int> next(4, 0);
  std::size_t cut = 0;
  for (const std::string& line : lines(p.out)) {
    int prefix = -1, number = -1, rank = -1;
    char host = 0;
    if (line.find(" [cut: 134464 more bytes]") != std::string::npos) {
      ++cut;
      continue;
    }
    ASSERT_EQ(sscanf(line.c_str(), "[w%c:%d] line %d of rank %d", &host, &prefix, &number, &rank), 4)
        << line.substr(0, 100);
    ASSERT_EQ(prefix, rank);
    ASSERT_EQ(host, rank < 2 ? 'a' : 'b');
    ASSERT_EQ(number, next[static_cast<std::size_t>(rank)]++);
  }
  EXPECT_EQ(next, (std::vector<int>{20000, 20000, 20000, 20000}));
  EXPECT_EQ(cut, 4u);
}

TEST(RunHosts, AFailureIsNamedAndEndsAllHosts) {
  const std::string folder = temporary_folder();
  Job p({"--log-dir", folder, "--grace", "1"},
        {"ignore=15", "child", "daemon", "step=217", "phase=4", "unit=layers.7", "0:inside=8812", "1:inside=8812",
         "2:inside=8812", "3:sleep=500", "3:err=the last words", "3:kill=9", "wait-for-failure", "0:exit=6",
         "sleep=60000"});
  EXPECT_EQ(p.finish(), 6);
  EXPECT_TRUE(p.says("--- last lines of rank 3 ---\nthe last words\n---\nzero run: FAILED (exit 6)  run " + p.run_id()))
      << p.err;
  const std::string block = p.err.substr(std::min(p.err.find("zero run: FAILED"), p.err.size()));
  EXPECT_NE(block.find("root cause   rank 3 of 4, host wb, pid "), std::string::npos) << p.err;
  EXPECT_NE(block.find(": killed by signal 9 (SIGKILL)\n"), std::string::npos) << p.err;
  EXPECT_NE(block.find("where        step 217, micro-batch 2, backward, unit layers.7, "), std::string::npos) << p.err;
  EXPECT_NE(block.find("collective   reduce_scatter #8812, bf16, 1048576 elements: ranks 0 1 2 inside, rank 3 not"),
            std::string::npos)
      << p.err;
  EXPECT_NE(block.find("collateral   rank 0 lost its peer, ranks 1 2 were stopped"), std::string::npos) << p.err;
  EXPECT_NE(block.find("log          " + folder + "/" + p.run_id() + "/rank-3.err (last 1 lines above)"),
            std::string::npos)
      << p.err;
}

TEST(RunHosts, TheFirstExitCodeIsPassedOn) {
  for (const char* rank : {"0", "3"}) {
    Job p({"--master-addr=127.0.0.1"},
          {std::string(rank) + ":sleep=200", std::string(rank) + ":exit=42", "sleep=60000"}, {},
          "localhost slots=2\nwb slots=2\n");
    EXPECT_EQ(p.finish(), 42);
    EXPECT_TRUE(p.says(std::string("root cause   rank ") + rank + " of 4, host " + (*rank == '0' ? "localhost" : "wb")))
        << p.err;
  }
  Job lost({}, {"0:exit=6", "1:lost", "1:exit=1", "2:sleep=300", "2:error=[Engine::step] got NaN", "2:exit=7",
                "sleep=60000"});
  EXPECT_EQ(lost.finish(), 7);
  EXPECT_TRUE(lost.says("error        [Engine::step] got NaN")) << lost.err;
  EXPECT_TRUE(lost.says("ranks 0 1 lost their peer")) << lost.err;
}

TEST(RunHosts, HangsAreSeenAcrossHosts) {
  Job p({"--hang-timeout", "1"}, {"step=4", "0:inside=11", "1:inside=11", "3:inside=11", "sleep=60000"});
  EXPECT_EQ(p.finish(), 6);
  EXPECT_TRUE(p.says("root cause   rank 2 of 4, host wb")) << p.err;
  EXPECT_TRUE(p.says("ranks 0 1 3 inside, rank 2 not")) << p.err;
  Job stopped({"--hang-timeout", "1", "--grace", "0.5"}, {"step=1", "3:kill=19", "inside=0", "sleep=60000"});
  EXPECT_EQ(stopped.finish(), 6);
  EXPECT_TRUE(stopped.says("root cause   rank 3 of 4, host wb")) << stopped.err;
  EXPECT_TRUE(stopped.says("the process is stopped")) << stopped.err;
}

TEST(RunHosts, Interrupt) {
  Job deaf({"--grace", "600"}, {"ignore=2", "ignore=15", "child", "out=up", "sleep=60000"});
  ASSERT_TRUE(deaf.all_say("up")) << deaf.err;
  deaf.signal(SIGINT);
  EXPECT_EQ(deaf.finish(), 130);
  EXPECT_FALSE(deaf.says("FAILED")) << deaf.err;
}

TEST(RunHosts, TerminateSavesOnAllHosts) {
  Job saved({}, {"handle=15,75", "out=up", "sleep=60000"});
  ASSERT_TRUE(saved.all_say("up"));
  saved.signal(SIGTERM);
  EXPECT_EQ(saved.finish(), 75) << saved.err;
  Job unsaved({"--grace", "0.3"}, {"0:handle=15,75", "out=up", "sleep=60000"});
  ASSERT_TRUE(unsaved.all_say("up"));
  unsaved.signal(SIGTERM);
  EXPECT_EQ(unsaved.finish(), 143) << unsaved.err;
}

TEST(RunHosts, RestartsOnAllHosts) {
  const std::string folder = temporary_folder();
  Job p({"--max-restarts", "2"}, {"3:first-time=" + folder + "/mark,6", "env=ZERO_RESTART_COUNT", "sleep=200"});
  EXPECT_EQ(p.finish(), 0) << p.err;
  EXPECT_TRUE(p.says("restart 1 of 2 in 1 s")) << p.err;
  EXPECT_NE(p.out.find("[wb:3] ZERO_RESTART_COUNT=1\n"), std::string::npos) << p.out;
}

TEST(RunHosts, AKilledLauncherLeavesNothingOnAnyHost) {
  Job p({}, {"ignore=15", "ignore=2", "ignore=1", "child", "daemon", "out=up", "sleep=60000"});
  ASSERT_TRUE(p.all_say("up"));
  p.signal(SIGKILL);
  EXPECT_EQ(p.wait(), 1000 + SIGKILL);
  EXPECT_TRUE(p.nothing_left(20));
}

TEST(RunHosts, AClosedConnectionIsALostHost) {
  Job p({"--grace=0.5"}, {"ignore=15", "child", "daemon", "out=up", "step=3", "sleep=60000"});
  ASSERT_TRUE(p.all_say("up"));
  const pid_t connection = p.connection_to("wb");
  ASSERT_GT(connection, 0);
  kill(-connection, SIGKILL);
  EXPECT_EQ(p.finish(), 6);
  EXPECT_TRUE(p.says("root cause   rank 2 of 4, host wb, pid ")) << p.err;
  EXPECT_TRUE(
      p.says("the connection to its host wb was lost (ssh was killed by signal 9, SIGKILL), and with it rank 3"))
      << p.err;
  EXPECT_TRUE(p.says("collateral   ranks 0 1 were stopped")) << p.err;
}

TEST(RunHosts, AConnectionWhoseProgramEndsIsClosedEvenIfItsPipesAreNot) {
  Job p({"--grace=0.5"}, {"ignore=15", "out=up", "sleep=60000"});
  ASSERT_TRUE(p.all_say("up"));
  kill(p.connection_to("wb"), SIGKILL);  // a shell whose children hold the pipes
  EXPECT_EQ(p.finish(), 6);
  EXPECT_TRUE(p.says("root cause   rank 2 of 4, host wb, pid ")) << p.err;
  EXPECT_TRUE(p.says("(ssh was killed by signal 9, SIGKILL), and with it rank 3")) << p.err;
}

TEST(RunHosts, AKilledAgentTakesItsRanksAlong) {
  Job p({"--grace=0.5"}, {"ignore=15", "child", "daemon", "out=up", "sleep=60000"});
  ASSERT_TRUE(p.all_say("up"));
  const pid_t agent = p.agent_on("wa");
  ASSERT_GT(agent, 0);
  kill(agent, SIGTERM);  // has no effect: the agent handles it and continues
  const std::string status = "/proc/" + std::to_string(agent) + "/status";
  const std::string none = "ShdPnd:\t0000000000000000";
  for (int tries = 0; tries < 3000 && file_text(status).find(none) == std::string::npos; ++tries) usleep(10000);
  EXPECT_NE(file_text(status).find(none), std::string::npos) << file_text(status);
  EXPECT_FALSE(p.says("FAILED"));
  kill(agent, SIGKILL);
  EXPECT_EQ(p.finish(), 6);
  EXPECT_TRUE(p.says("root cause   rank 0 of 4, host wa")) << p.err;
}

TEST(RunHosts, SilenceIsALostHost) {
  // Ranks that print nothing for longer than the limit do not make the host lost.
  Job p({"--host-timeout", "2", "--grace=0.5"}, {"out=up", "sleep=3000", "out=still", "sleep=60000"});
  ASSERT_TRUE(p.all_say("still")) << "signs of life go both ways: " << p.err;
  EXPECT_FALSE(p.says("FAILED")) << p.err;
  const pid_t agent = p.agent_on("wb");
  ASSERT_GT(agent, 0);
  kill(agent, SIGSTOP);
  EXPECT_EQ(p.wait(), 6);
  EXPECT_TRUE(p.says("root cause   rank 2 of 4, host wb")) << p.err;
  EXPECT_TRUE(p.says("its host wb has been silent for 2 s, and with it rank 3")) << p.err;
  kill(agent, SIGCONT);
  EXPECT_TRUE(p.nothing_left(20)) << "as soon as the agent runs again";
}

// Ctrl-Z: the launcher is silent for longer than the limit, but its connections are open.
TEST(RunHosts, ALauncherThatWasStoppedContinues) {
  Job p({"--host-timeout", "1", "--hang-timeout", "2"}, {"out=up", "sleep=7000", "out=done"});
  ASSERT_TRUE(p.all_say("up"));
  p.signal(SIGSTOP);
  sleep(5);
  p.signal(SIGCONT);
  EXPECT_EQ(p.finish(), 0) << p.err;
  EXPECT_TRUE(p.says("zero run: warning: the launcher was stopped for ")) << p.err;
  EXPECT_TRUE(p.all_say("done")) << p.out;
}

TEST(RunHosts, AgentsDoNotOutliveASilentLauncher) {
  Job p({"--host-timeout", "0.5"}, {"ignore=15", "child", "out=up", "sleep=60000"});  // 20 times that
  ASSERT_TRUE(p.all_say("up"));
  p.signal(SIGSTOP);
  EXPECT_TRUE(left_behind("ZERO_RUN_ID=" + p.run_id()).empty());
  p.signal(SIGCONT);
  EXPECT_EQ(p.finish(), 6) << p.err;
}

TEST(RunHosts, NothingStartsUnlessAllHostsCan) {
  const std::string folder = temporary_folder();
  const Words touch{"out=started"};
  Job refused({}, touch, {"FAKE_SSH_REFUSE=wb"});
  EXPECT_EQ(refused.wait(), 6);
  EXPECT_TRUE(
      refused.says("zero run: error: [zero run] got ssh ended with exit code 255: someone@wb: Permission denied "
                   "(publickey). for host wb"))
      << refused.err;
  EXPECT_TRUE(refused.says("`ssh wb true` must work without a question")) << refused.err;
  EXPECT_EQ(refused.out, "");
  EXPECT_TRUE(refused.nothing_left(20));

  Job named({}, touch, {"FAKE_SSH_REFUSE=wb"}, "wa slots=1\nbob@wb slots=1\n");
  EXPECT_EQ(named.wait(), 6);
  EXPECT_TRUE(named.says("`ssh bob@wb true` must work without a question")) << named.err;

  HostsJob missing("wa slots=1\nwb slots=1\n", {"no-such-program-here"});
  EXPECT_EQ(missing.wait(), 2);
  EXPECT_TRUE(missing.says("cannot run \"no-such-program-here\"")) << missing.err;
  EXPECT_TRUE(missing.says("(host w")) << missing.err;

  Process::Settings settings;
  settings.arguments = {ZERO_BINARY_DIR "/bin/zero", "run", "-H", missing.hostfile, kRank};
  settings.environment = {"PATH=/no/such/folder"};
  Process no_ssh(settings);
  EXPECT_EQ(no_ssh.wait(), 2);
  EXPECT_NE(no_ssh.err.find("cannot run \"ssh\""), std::string::npos) << no_ssh.err;

  Job cores({"--bind_core_list", "1000"}, touch);
  EXPECT_EQ(cores.wait(), 2);
  EXPECT_TRUE(cores.says("got core 1000")) << cores.err;
  EXPECT_EQ(cores.out, "");
}

TEST(RunHosts, AnInterruptWhileAHostDoesNotAnswer) {
  Job p({}, {"out=x"}, {"FAKE_SSH_SILENT=wb"});
  ASSERT_TRUE(p.wait_for(", run "));
  for (int tries = 0; tries < 2000 && p.agent_on("wa") < 0; ++tries) usleep(10000);
  p.signal(SIGINT);
  EXPECT_EQ(p.finish(), 130);
  EXPECT_EQ(p.out, "");
}

TEST(RunHosts, AProgramThatDoesNotRunIsToldOnce) {
  const std::string script = temporary_folder() + "/script";
  std::ofstream(script) << "echo no first line\n";
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  HostsJob p("wa slots=2\nwb slots=2\n", {script});
  EXPECT_EQ(p.finish(), 2);
  EXPECT_EQ(lines(p.err).size(), 2u) << p.err;
  EXPECT_TRUE(p.says("Hint: a script needs a first line such as #!/bin/sh. (host w")) << p.err;
}

TEST(RunHosts, WhatALoginScriptWritesIsNoHarm) {
  Job p({}, {"out=x"}, {"FAKE_SSH_BANNER=Welcome!\n\n*** maintenance on Sunday ***"});
  EXPECT_EQ(p.finish(), 0) << p.err;
  EXPECT_EQ(sorted(lines(p.out)), (Words{"[wa:0] x", "[wa:1] x", "[wb:2] x", "[wb:3] x"}));
}

TEST(RunHosts, PortAndArgumentsReachSsh) {
  const std::string folder = temporary_folder();
  Job p({"--ssh_port", "2222", "--launcher_args", "-i 'my key' -l me"}, {"out=x"}, {"FAKE_SSH_LOG=" + folder + "/log"});
  EXPECT_EQ(p.finish(), 0) << p.err;
  EXPECT_NE(file_text(folder + "/log").find("\n-p\n2222\n-i\nmy key\n-l\nme\n--\nwa\n"), std::string::npos)
      << file_text(folder + "/log");
}

TEST(RunHosts, SrunAndMpirun) {
  for (const std::string launcher : {"srun", "mpirun"}) {
    const std::string folder = temporary_folder();
    Job p({"--launcher", launcher, "--launcher_args=--quiet"},
          {"env=FAKE_SSH_HOST", "3:sleep=200", "3:exit=9", "sleep=60000"}, {"FAKE_SSH_LOG=" + folder + "/log"});
    EXPECT_EQ(p.finish(), 9) << p.err;
    EXPECT_EQ(sorted(lines(p.out)), (Words{"[wa:0] FAKE_SSH_HOST=wa", "[wa:1] FAKE_SSH_HOST=wa",
                                           "[wb:2] FAKE_SSH_HOST=wb", "[wb:3] FAKE_SSH_HOST=wb"}));
    EXPECT_TRUE(p.says("rank 3 of 4, host wb")) << p.err;
    EXPECT_NE(file_text(folder + "/log").find("\n--quiet\n"), std::string::npos);
  }
}

TEST(RunHosts, JsonNamesTheHost) {
  Job p({"--json"}, {"2:exit=5", "sleep=60000"});
  EXPECT_EQ(p.finish(), 5);
  ASSERT_EQ(lines(p.out).size(), 1u) << p.out;
  for (const char* part :
       {"\"root_cause\": {\"rank\": 2, \"ranks\": 4, \"host\": \"wb\"", "\"ranks\": 4, \"attempts\": 1"})
    EXPECT_NE(p.out.find(part), std::string::npos) << part << "\n" << p.out;
}

// The same command on every host; here every "host" is this one.
TEST(RunByHand, EachLauncherStartsItsOwnRanks) {
  const std::string folder = temporary_folder();
  std::ofstream(folder + "/hosts") << "wa slots=1\nwb slots=2\nwc slots=1\n";
  const auto start = [&](const Words& options, const std::string& run) {
    Process::Settings settings;
    settings.arguments = Words{ZERO_BINARY_DIR "/bin/zero", "run"} + options + Words{kRank};
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
                             "MASTER_ADDR", "MASTER_PORT", "ZERO_RUN_ID", "ZERO_TOKEN"})
      settings.arguments.push_back(std::string("env=") + name);
    settings.environment = {"ZERO_TOKEN=ours", "CUDA_VISIBLE_DEVICES=", run};
    return settings;
  };
  Process first(start({"-H", folder + "/hosts", "--no_ssh", "--node_rank", "0"}, "ZERO_RUN_ID"));
  Process second(start({"-H", folder + "/hosts", "--node_rank=1"}, "ZERO_RUN_ID"));
  EXPECT_EQ(first.wait(), 0) << first.err;
  EXPECT_EQ(second.wait(), 0) << second.err;
  EXPECT_EQ(
      first.out,
      "[wa:0] RANK=0\n[wa:0] WORLD_SIZE=4\n[wa:0] LOCAL_RANK=0\n[wa:0] LOCAL_WORLD_SIZE=1\n[wa:0] GROUP_RANK=0\n[wa:0] "
      "GROUP_WORLD_SIZE=3\n"
      "[wa:0] MASTER_ADDR=wa\n[wa:0] MASTER_PORT=29500\n[wa:0] ZERO_RUN_ID=hosts-wa-29500\n[wa:0] ZERO_TOKEN=ours\n");
  EXPECT_NE(first.err.find("ranks: 4 on host wa (number 0 of 3) from "), std::string::npos) << first.err;
  EXPECT_EQ(said_by(2, second.out).find("RANK=2\nWORLD_SIZE=4\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nGROUP_RANK=1\n"), 0u)
      << second.out;
  EXPECT_EQ(said_by(1, second.out).find("RANK=1\n"), 0u) << second.out;
  EXPECT_NE(second.out.find("[wb:1] "), std::string::npos) << second.out;

  // As torchrun: no hostfile, equal hosts.
  Process third(start(
      {"--nnodes=3", "--node_rank", "2", "--nproc-per-node=2", "--master_addr", "10.0.0.1", "--master_port", "4242"},
      "ZERO_RUN_ID=mine"));
  EXPECT_EQ(third.wait(), 0) << third.err;
  EXPECT_EQ(said_by(4, third.out).find("RANK=4\nWORLD_SIZE=6\nLOCAL_RANK=0\n"), 0u) << third.out;
  EXPECT_EQ(said_by(5, third.out),
            "RANK=5\nWORLD_SIZE=6\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nGROUP_RANK=2\nGROUP_WORLD_SIZE=3\n"
            "MASTER_ADDR=10.0.0.1\nMASTER_PORT=4242\nZERO_RUN_ID=mine\nZERO_TOKEN=ours\n");
  Process bad(start({"--nnodes=2", "--node_rank=0", "--master_addr=h"}, "ZERO_RUN_ID=../up"));
  EXPECT_EQ(bad.wait(), 2);
  EXPECT_NE(bad.err.find("[zero run] got ZERO_RUN_ID="), std::string::npos) << bad.err;
}

// The run id of launchers that are started by hand can be guessed, and so can the names of their logs.
TEST(RunByHand, LogsFollowNoLink) {
  const std::string folder = temporary_folder(), logs = folder + "/logs/hosts-127.0.0.1-29507";
  std::ofstream(folder + "/victim") << "mine\n";
  std::filesystem::create_directories(logs);
  std::filesystem::create_symlink("../../victim", logs + "/rank-0.out");
  const Words by_hand{ZERO_BINARY_DIR "/bin/zero",
                      "run",
                      "--nnodes=2",
                      "--node_rank=0",
                      "--nproc-per-node=1",
                      "--master_addr",
                      "127.0.0.1",
                      "--master_port",
                      "29507"};
  Process linked({by_hand + Words{"--log-dir", folder + "/logs", kRank, "out=hello"}, {"ZERO_TOKEN=ours"}, {}, -1});
  EXPECT_EQ(linked.wait(), 5) << linked.err;
  EXPECT_NE(linked.err.find(logs + "/rank-0.out: it is a link, expected a regular file"), std::string::npos)
      << linked.err;
  std::filesystem::create_symlink(folder + "/victim", folder + "/pid");
  Process pid({by_hand + Words{"--save-pid", folder + "/pid", kRank, "out=hello"}, {"ZERO_TOKEN=ours"}, {}, -1});
  EXPECT_EQ(pid.wait(), 5) << pid.err;
  EXPECT_EQ(file_text(folder + "/victim"), "mine\n");
}

TEST(RunByHand, SeveralHostsNeedASecret) {
  const auto ended = [](const std::string& secret) {
    return run_to_end({{ZERO_BINARY_DIR "/bin/zero", "run", "--nnodes=2", "--node_rank=1", "-n1",
                        "--master_addr=10.0.0.1", kRank, "env=ZERO_TOKEN", "env=ZERO_TOKEN_FILE"},
                       {"ZERO_TOKEN", "ZERO_TOKEN_FILE", secret},
                       {},
                       -1});
  };
  const auto none = ended("ZERO_TOKEN");
  EXPECT_EQ(none.code, 2);
  EXPECT_NE(none.err.find("[zero run] got no ZERO_TOKEN for several hosts"), std::string::npos) << none.err;
  EXPECT_NE(none.err.find("ZERO_TOKEN=none"), std::string::npos) << none.err;
  for (const std::string secret : {"ZERO_TOKEN=none", "ZERO_TOKEN_FILE=/a/file"}) {
    const auto given = ended(secret);
    EXPECT_EQ(given.code, 0) << given.err;
    EXPECT_NE(given.out.find(secret), std::string::npos) << given.out;
  }
}

TEST(RunByHand, AFailureIsNumberedAsInTheWorld) {
  Process p({{ZERO_BINARY_DIR "/bin/zero", "run", "--nnodes=2", "--node_rank=1", "-n2", "--master_addr=10.0.0.1", kRank,
              "3:sleep=100", "3:exit=9", "sleep=60000"},
             {"ZERO_TOKEN=ours"},
             {},
             -1});
  EXPECT_EQ(p.wait(), 9);
  EXPECT_NE(p.err.find("root cause   rank 3 of 4, host "), std::string::npos) << p.err;
  EXPECT_NE(p.err.find("rank 2 was stopped"), std::string::npos) << p.err;
}

}  // namespace
}  // namespace zero::test::run_hosts_test
