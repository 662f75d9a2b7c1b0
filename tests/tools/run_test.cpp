// `zero run`: the environment of a rank, its output, and the exit code. Failures and signals are in
// run_failure_test.cpp.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "support/file_text.h"
#include "support/process.h"

namespace zero::test::run_test {
namespace {

const std::string kZero = ZERO_BINARY_DIR "/bin/zero";
const std::string kRank = ZERO_BINARY_DIR "/tests/rank_program";

std::vector<std::string> run_arguments(std::vector<std::string> options, std::vector<std::string> actions) {
  std::vector<std::string> all{kZero, "run"};
  all.insert(all.end(), options.begin(), options.end());
  all.push_back(kRank);
  all.insert(all.end(), actions.begin(), actions.end());
  return all;
}

std::vector<std::string> sorted(std::vector<std::string> list) {
  std::sort(list.begin(), list.end());
  return list;
}

TEST(Run, PrefixesWholeLinesOfBothStreams) {
  Process p(run_arguments({"-n", "3"}, {"out=hello", "1:err=careful"}));
  EXPECT_EQ(p.wait(), 0);
  EXPECT_EQ(sorted(lines(p.out)), (std::vector<std::string>{"[0] hello", "[1] hello", "[2] hello"}));
  EXPECT_EQ(lines(p.err, "zero run:"), std::vector<std::string>{"[1] careful"});
  EXPECT_EQ(p.err.find("zero run: ranks: 3 on localhost from --num-gpus, run "), 0u) << p.err;
}

TEST(Run, LinesOfManyRanksNeverMix) {
  Process p(run_arguments({"-n", "8"}, {"lines=2000"}));
  EXPECT_EQ(p.wait(60), 0);
  std::vector<int> next(8, 0);
  int count = 0;
  for (const std::string& line : lines(p.out)) {
    int prefix = -1, number = -1, rank = -1;
    ASSERT_EQ(sscanf(line.c_str(), "[%d] line %d of rank %d", &prefix, &number, &rank), 3) << line;
    EXPECT_EQ(prefix, rank);
    EXPECT_EQ(number, next[static_cast<std::size_t>(rank)]++) << "in order within a rank";
    ++count;
  }
  EXPECT_EQ(count, 16000);
}

// As daemons, cron and some job systems start programs.
TEST(Run, WithoutStandardStreams) {
  const std::string folder = temporary_folder();
  for (const std::string closed : {"<&-", ">&-", "2>&-", "<&- >&- 2>&-"}) {
    Process p({"/bin/sh", "-c",
               "exec " + kZero + " run -n 2 --log-dir " + folder + "/logs " + kRank +
                   " out=hello err=careful 1:exit=3 " + closed});
    EXPECT_EQ(p.wait(), 3) << closed << p.err;
    if (closed == "2>&-") {
      EXPECT_EQ(sorted(lines(p.out)), (std::vector<std::string>{"[0] hello", "[1] hello"}));
    }
  }
  int logs = 0;
  for (const auto& run : std::filesystem::directory_iterator(folder + "/logs")) {
    EXPECT_EQ(file_text(run.path() / "rank-1.out"), "hello\n");
    EXPECT_EQ(file_text(run.path() / "rank-1.err"), "careful\n");
    ++logs;
  }
  EXPECT_EQ(logs, 4);
}

TEST(Run, OutputChoices) {
  Process none(run_arguments({"-n2", "--output=none"}, {"out=a", "err=b"}));
  EXPECT_EQ(none.wait(), 0);
  EXPECT_EQ(none.out, "");
  EXPECT_TRUE(lines(none.err, "zero run:").empty());
  Process first(run_arguments({"-n2", "--output", "rank0", "--no-prefix"}, {"env=RANK"}));
  EXPECT_EQ(first.wait(), 0);
  EXPECT_EQ(first.out, "RANK=0\n");
  Process quiet(run_arguments({"-n1", "-q"}, {"out=a"}));
  EXPECT_EQ(quiet.wait(), 0);
  EXPECT_EQ(quiet.err, "");
}

TEST(Run, LongLinesAreCutAndBarsBecomeTheirLastState) {
  Process p(run_arguments(
      {"-n", "1"}, {"long=200000", "long=65536", "raw=10%\\r50%\\r100%\\n", "raw=a\\r\\nb\\n", "raw=no newline"}));
  EXPECT_EQ(p.wait(), 0);
  const std::vector<std::string> shown = lines(p.out);
  ASSERT_EQ(shown.size(), 6u);
  EXPECT_EQ(shown[0], "[0] " + std::string(65536, 'x') + " [cut: 134464 more bytes]");
  EXPECT_EQ(shown[1], "[0] " + std::string(65536, 'x'));
  EXPECT_EQ(shown[2], "[0] 100%");
  EXPECT_EQ(shown[3], "[0] a");
  EXPECT_EQ(shown[4], "[0] b");
  EXPECT_EQ(shown[5], "[0] no newline");
}

TEST(Run, LogFilesHoldUnprefixedLines) {
  const std::string folder = temporary_folder();
  Process p(run_arguments({"-n", "2", "--enable_each_rank_log", folder + "/logs", "--output", "none"},
                          {"out=to out", "err=to err", "env=ZERO_LOG_DIR", "env=ZERO_RUN_ID"}));
  EXPECT_EQ(p.wait(), 0) << p.err;
  std::vector<std::filesystem::path> runs;
  for (const auto& entry : std::filesystem::directory_iterator(folder + "/logs")) runs.push_back(entry.path());
  ASSERT_EQ(runs.size(), 1u);
  const std::string id = runs[0].filename();
  EXPECT_NE(p.err.find("run " + id), std::string::npos);
  for (const char* rank : {"0", "1"}) {
    EXPECT_EQ(file_text(runs[0] / (std::string("rank-") + rank + ".out")),
              "to out\nZERO_LOG_DIR=" + runs[0].string() + "\nZERO_RUN_ID=" + id + "\n");
    EXPECT_EQ(file_text(runs[0] / (std::string("rank-") + rank + ".err")), "to err\n");
  }
}

TEST(Run, SetsTheEnvironmentOfARank) {
  Process::Settings settings;
  settings.arguments = run_arguments({"-n", "4"}, {});
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_SIZE",
        "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "KEPT", "ZERO_TOKEN"})
    settings.arguments.push_back(std::string("2:env=") + name);
  for (const char* name : {"MASTER_PORT", "ZERO_RUN_ID"}) settings.arguments.push_back(std::string("env=") + name);
  settings.environment = {"RANK=77",  "WORLD_SIZE=78",   "TORCHELASTIC_RUN_ID=old",
                          "KEPT=yes", "OMP_NUM_THREADS", "ZERO_TOKEN"};
  Process p(settings);
  EXPECT_EQ(p.wait(), 0);
  std::vector<std::string> of_two;
  std::set<std::string> ports, ids;
  for (const std::string& line : lines(p.out)) {
    const std::string text = line.substr(4);
    if (text.find("MASTER_PORT=") == 0)
      ports.insert(text.substr(12));
    else if (text.find("ZERO_RUN_ID=") == 0)
      ids.insert(text.substr(12));
    else
      of_two.push_back(text);
  }
  const int threads = std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)) / 4);
  ASSERT_EQ(of_two.size(), 14u);
  EXPECT_EQ(std::vector<std::string>(of_two.begin(), of_two.begin() + 10),
            (std::vector<std::string>{"RANK=2", "WORLD_SIZE=4", "LOCAL_RANK=2", "LOCAL_WORLD_SIZE=4", "GROUP_RANK=0",
                                      "GROUP_WORLD_SIZE=1", "LOCAL_SIZE=4", "CROSS_RANK=0", "CROSS_SIZE=1",
                                      "MASTER_ADDR=127.0.0.1"}));
  const int given = std::atoi(of_two[10].c_str() + strlen("OMP_NUM_THREADS="));
  EXPECT_GE(given, 1);
  EXPECT_LE(given, threads);
  EXPECT_EQ(of_two[11], "TORCHELASTIC_RUN_ID=(unset)");
  EXPECT_EQ(of_two[12], "KEPT=yes");
  EXPECT_EQ(of_two[13].size(), strlen("ZERO_TOKEN=") + 64);
  EXPECT_EQ(ports.size(), 1u);
  EXPECT_GT(std::stoi(*ports.begin()), 1023);
  EXPECT_EQ(ids.size(), 1u);
  EXPECT_EQ(p.err.find(of_two[13].substr(11)), std::string::npos) << "the token is never printed";
}

TEST(Run, KeepsWhatTheUserSet) {
  Process::Settings settings;
  const std::string folder = temporary_folder();
  std::ofstream(folder + "/vars") << "# comment\nFROM_FILE=a b=c\n";
  settings.arguments = run_arguments(
      {"-n1", "--env-file", folder + "/vars", "--master_port=4242", "--master-addr", "localhost", "--pass_local_rank"},
      {"env=OMP_NUM_THREADS", "env=FROM_FILE", "env=MASTER_PORT", "env=MASTER_ADDR"});
  settings.environment = {"OMP_NUM_THREADS=7"};
  Process p(settings);
  EXPECT_EQ(p.wait(), 0);
  EXPECT_EQ(lines(p.out),
            (std::vector<std::string>{"[0] OMP_NUM_THREADS=7", "[0] FROM_FILE=a b=c", "[0] MASTER_PORT=4242",
                                      "[0] MASTER_ADDR=localhost", "[0] argument --local_rank=0"}));
}

TEST(Run, VisibleDevicesAreTheSlots) {
  Process::Settings settings;
  settings.arguments = run_arguments({"-i", "localhost:1,3"}, {"env=CUDA_VISIBLE_DEVICES"});
  settings.environment = {"CUDA_VISIBLE_DEVICES=4,5,6,7"};
  Process p(settings);
  EXPECT_EQ(p.wait(), 0) << p.err;
  EXPECT_EQ(sorted(lines(p.out)),
            (std::vector<std::string>{"[0] CUDA_VISIBLE_DEVICES=5,7", "[1] CUDA_VISIBLE_DEVICES=5,7"}));
  settings.arguments = run_arguments({"-n", "5"}, {"out=x"});
  Process more(settings);
  EXPECT_EQ(more.wait(), 2);
  EXPECT_NE(more.err.find("got 5 ranks, expected at most the 4 GPUs"), std::string::npos) << more.err;
  EXPECT_EQ(more.out, "");
}

TEST(Run, RanksGetOnlyTheirOwnDescriptors) {
  Process alone({kRank, "fd-count"});
  EXPECT_EQ(alone.wait(), 0);
  const int inherited = std::stoi(alone.out.substr(4));
  Process p(run_arguments({"-n4", "--log-dir", temporary_folder()}, {"fd-count"}));
  EXPECT_EQ(p.wait(), 0);
  EXPECT_EQ(lines(p.out).size(), 4u);
  for (const std::string& line : lines(p.out))
    EXPECT_EQ(line.substr(4), "fds " + std::to_string(inherited + 1)) << "one more: the status page";
}

TEST(Run, BindsCoresToRanks) {
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  const int cores = CPU_COUNT(&set);
  Process p(run_arguments({"-n", "1", "--bind_cores_to_rank"}, {"cores"}));
  EXPECT_EQ(p.wait(), 0);
  if (cores >= 2) {
    Process two(run_arguments({"-n", "2", "--bind_cores_to_rank"}, {"cores"}));
    EXPECT_EQ(two.wait(), 0);
    const auto shown = sorted(lines(two.out));
    ASSERT_EQ(shown.size(), 2u);
    EXPECT_NE(shown[0].substr(4), shown[1].substr(4)) << "disjoint";
    EXPECT_LT(shown[0].size(), lines(p.out)[0].size()) << "a part of the cores";
  }
  Process many(run_arguments({"-n", std::to_string(cores + 1), "--bind-cores-to-rank"}, {"cores"}));
  EXPECT_EQ(many.wait(), 2);
  EXPECT_NE(many.err.find("expected at least one core a rank"), std::string::npos) << many.err;
  Process bad(run_arguments({"-n", "1", "--bind_core_list", "0,1000"}, {"cores"}));
  EXPECT_EQ(bad.wait(), 2);
  EXPECT_NE(bad.err.find("got core 1000"), std::string::npos) << bad.err;
}

TEST(Run, ProgramArgumentsAreNotOptions) {
  Process p(run_arguments({"-n", "1"}, {"--help", "--gups", "out=x"}));
  EXPECT_EQ(p.wait(), 0);
  EXPECT_EQ(p.out, "[0] argument --help\n[0] argument --gups\n[0] x\n");
  Process dashes({kZero, "run", "-n", "1", "--", kRank, "out=x"});
  EXPECT_EQ(dashes.wait(), 0);
  EXPECT_EQ(dashes.out, "[0] x\n");
}

TEST(Run, ChecksBeforeStarting) {
  const std::string folder = temporary_folder();
  std::ofstream(folder + "/script") << "echo hi\n";
  std::ofstream(folder + "/hosts") << "localhost slots=2\nelsewhere slots=2\n";
  chmod((folder + "/script").c_str(), 0644);
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t size = sizeof address;
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  const std::string taken = std::to_string(ntohs(address.sin_port));
  struct Case {
    std::vector<std::string> arguments;
    int code;
    std::string text;
  };
  const std::vector<Case> cases = {
      {{"run"}, 2, "got no PROGRAM"},
      {{"run", "no-such-program-here"}, 2, "cannot run \"no-such-program-here\": No such file or directory"},
      {{"run", folder + "/script"}, 2, "chmod +x"},
      {{"run", folder}, 2, "Is a directory"},
      {{"run", "-n", "0", "true"}, 2, "expected a number from 1 to 1024"},
      {{"run", "-n", "2x", "true"}, 2, "got \"2x\""},
      {{"run", "-n", "1", "--num_gpus=2", "true"}, 2, "got the option twice"},
      {{"run", "-n"}, 2, "got no value"},
      {{"run", "--gups", "2", "true"}, 2, "did you mean --num-gpus?"},
      {{"run", "--hang-timout=5", "true"}, 2, "did you mean --hang-timeout?"},
      {{"run", "--grace", "-1", "true"}, 2, "expected a number from 0 to 86400"},
      {{"run", "--module", "true"}, 2, "Hint: zero run python -m MODULE"},
      {{"run", "--deepspeed", "--save_pid", "train.py"}, 2, "got no PROGRAM"},
      {{"run", "--deepspeed", "--save_pid", "train.py", "data.json"},
       2,
       "[--save-pid] got the option with --deepspeed"},
      {{"run", "--launcher", "pdsh", "true"}, 2, "expected one of ssh, srun, mpirun"},
      {{"run", "--output", "rank1", "true"}, 2, "did you mean \"rank0\"?"},
      {{"run", "-i", "localhost:0", "-e", "localhost:0", "true"}, 2, "expected one of the two"},
      {{"run", "-i", "localhost:0", "-n", "1", "true"}, 2, "either a filter or numbers"},
      {{"run", "-i", "other", "true"}, 2, "got host \"other\""},
      {{"run", "-H", folder + "/hosts", "true"}, 2, "[--master-addr] got none and localhost as the first host"},
      {{"run", "-H", folder, "true"}, 2, "[--hostfile] got a directory"},
      {{"run", "-H", folder + "/hosts", "-n", "3", "true"},
       2,
       "got 3 ranks, expected at most the 2 slots of localhost"},
      {{"run", "-H", folder + "/hosts", "-n", "cpu", "true"}, 2, "got cpu for 2 hosts, expected a number"},
      {{"run", "-H", folder + "/hosts", "--nnodes=3", "true"}, 2, "got 3 hosts, expected at most 2"},
      {{"run", "-H", folder + "/hosts", "--node_rank=2", "true"}, 2, "got 2 of 2 hosts, expected at most 1"},
      {{"run", "-H", folder + "/hosts", "--node_rank=1", "true"},
       2,
       "is elsewhere in " + folder + "/hosts, but this host is localhost"},
      {{"run", "-H", folder + "/hosts", "--no_ssh", "true"}, 2, "got 2 hosts without --node-rank"},
      {{"run", "-H", folder + "/hosts", "--node_rank=0", "--launcher=ssh", "true"}, 2, "expected one of the two ways"},
      {{"run", "-H", folder + "/hosts", "--master_addr=h", "--launcher_args='", "true"},
       2,
       "[--launcher-args:1:1] got a ' without its end"},
      {{"run", "-H", folder + "/hosts", "--master_addr=h", "--export=NO_SUCH_NAME", "true"},
       2,
       "got \"NO_SUCH_NAME\", which is not set"},
      {{"run", "-H", folder + "/hosts", "--master_addr=h", "--export=MASTER_ADDR", "true"}, 2, "[--export] got "},
      {{"run", "--nnodes=2", "--node_rank=0", "true"}, 2, "[--master-addr] got none and no hostfile"},
      {{"run", "-H", folder + "/none", "true"}, 2, "No such file"},
      {{"run", "--nnodes", "2", "true"}, 2, "--hostfile"},
      {{"run", "--node-rank", "1", "true"}, 2, "--nnodes N tells how many there are"},
      {{"run", "--launcher", "srun", "true"}, 2, "got srun and no other host"},
      {{"run", "--elastic_training", "true"}, 2, "[--elastic_training] got an option that is refused"},
      {{"run", "--venv_script", "x", "true"}, 2, "[--venv_script] got an option that is refused"},
      {{"run", "--autotuning=tune", "true"}, 2, "[--autotuning] got an option that is refused"},
      {{"run", "--master_port", "0", "true"}, 2, "expected a whole number from 1 to 65535"},
      {{"run", "--master_port", taken, "true"}, 2, "Address already in use"},
      {{"run", "-n", "gpu", "true"}, 2, "expected a host with GPUs"},
      {{"run", "--log-dir", "/proc/none", "true"}, 5, "[--log-dir] cannot write to /proc/none: "},
      {{"run", "--json=1", "true"}, 2, "expected no value"},
  };
  for (const Case& c : cases) {
    std::vector<std::string> arguments{kZero};
    arguments.insert(arguments.end(), c.arguments.begin(), c.arguments.end());
    Process::Settings settings;
    settings.arguments = arguments;
    settings.environment = {"CUDA_VISIBLE_DEVICES"};
    Process p(settings);
    EXPECT_EQ(p.wait(), c.code) << c.text << "\n" << p.err;
    EXPECT_NE(p.err.find(c.text), std::string::npos) << p.err;
    EXPECT_EQ(p.err.find("zero run: error: "), 0u) << p.err;
    EXPECT_EQ(p.out, "");
  }
  close(listener);
}

TEST(Run, FindsZeroNextToItself) {
  Process::Settings settings;
  settings.arguments = {kZero, "run", "-n", "2", "zero", "--version"};
  settings.environment = {"PATH=/no/such/folder"};
  Process p(settings);
  EXPECT_EQ(p.wait(), 0) << p.err;
  ASSERT_EQ(lines(p.out).size(), 2u) << p.out;
  EXPECT_EQ(sorted(lines(p.out))[1].find("[1] zero 0."), 0u) << p.out;
}

TEST(Run, RankCountsOfTheHost) {
  cpu_set_t set, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  CPU_ZERO(&one);
  for (int c = 0; c < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++c)
    if (CPU_ISSET(c, &set)) CPU_SET(c, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  for (const char* word : {"cpu", "auto"}) {
    Process::Settings settings;
    settings.arguments = run_arguments({"--nproc-per-node", word}, {"env=WORLD_SIZE"});
    settings.environment = {"CUDA_VISIBLE_DEVICES="};
    Process p(settings);
    EXPECT_EQ(p.wait(), 0) << p.err;
    EXPECT_EQ(p.out, "[0] WORLD_SIZE=1\n") << word;
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof set, &set), 0);
  Process::Settings gpus;
  gpus.arguments = run_arguments({"-n", "gpu"}, {"env=WORLD_SIZE"});
  gpus.environment = {"CUDA_VISIBLE_DEVICES=2,5"};
  Process two(gpus);
  EXPECT_EQ(two.wait(), 0) << two.err;
  EXPECT_EQ(sorted(lines(two.out)), (std::vector<std::string>{"[0] WORLD_SIZE=2", "[1] WORLD_SIZE=2"}));
}

TEST(Run, PointsOutTheFileThatIsNotRead) {
  const std::string folder = temporary_folder();
  std::ofstream(folder + "/.deepspeed_env") << "SECRET=1\n";
  Process::Settings settings;
  settings.arguments = run_arguments({"-n1"}, {"env=SECRET"});
  settings.folder = folder;
  Process p(settings);
  EXPECT_EQ(p.wait(), 0);
  EXPECT_EQ(p.out, "[0] SECRET=(unset)\n");
  EXPECT_NE(p.err.find(".deepspeed_env is not read: use --env-file"), std::string::npos) << p.err;
}

TEST(Run, HelpFitsAndEndsWithAnExample) {
  for (const std::vector<std::string>& words : {std::vector<std::string>{}, {"run"}, {"doctor"}}) {
    std::vector<std::string> arguments{kZero};
    arguments.insert(arguments.end(), words.begin(), words.end());
    arguments.push_back("--help");
    Process p(arguments);
    EXPECT_EQ(p.wait(), 0);
    EXPECT_EQ(p.err, "");
    for (const std::string& line : lines(p.out)) EXPECT_LE(line.size(), 80u) << line;
    const std::size_t example = p.out.find("\nExample\n  zero ");
    ASSERT_NE(example, std::string::npos) << p.out;
    EXPECT_EQ(std::count(p.out.begin() + static_cast<std::ptrdiff_t>(example), p.out.end(), '\n'), 3)
        << "nothing comes after it";
  }
}

TEST(Run, StartsWithoutLoadingTorch) {
  Process::Settings settings;
  settings.arguments = {kZero, "--help"};
  settings.environment = {"LD_TRACE_LOADED_OBJECTS=1"};  // the loader lists the libraries instead
  Process p(settings);
  EXPECT_EQ(p.wait(), 0);
  EXPECT_NE(p.out.find("libc.so"), std::string::npos) << p.out;
  for (const char* name : {"libtorch", "libc10", "libzero"}) EXPECT_EQ(p.out.find(name), std::string::npos) << p.out;
}

TEST(Run, HostfileOfThisHostAlone) {
  const std::string folder = temporary_folder();
  std::ofstream(folder + "/hosts") << "localhost slots=3\nelsewhere slots=2\n";
  Process::Settings settings;
  settings.arguments = run_arguments({"-H", folder + "/hosts", "--num_nodes", "1"}, {"env=RANK"});
  settings.environment = {"CUDA_VISIBLE_DEVICES="};
  Process p(settings);
  EXPECT_EQ(p.wait(), 0) << p.err;
  EXPECT_EQ(lines(p.out).size(), 3u);
  settings.arguments = run_arguments({"-H", folder + "/hosts", "-i", "localhost:0,2"}, {"env=WORLD_SIZE"});
  Process filtered(settings);
  EXPECT_EQ(filtered.wait(), 0) << filtered.err;
  EXPECT_EQ(sorted(lines(filtered.out)), (std::vector<std::string>{"[0] WORLD_SIZE=2", "[1] WORLD_SIZE=2"}));
}

TEST(Run, OptionsWithoutEffectAreListed) {
  Process p(run_arguments({"-n1", "--no_python", "--no_local_rank"}, {"out=x"}));
  EXPECT_EQ(p.wait(), 0);
  EXPECT_NE(p.err.find("zero run: warning: --no_python has no effect"), std::string::npos) << p.err;
  EXPECT_NE(p.err.find("zero run: warning: --no_local_rank has no effect"), std::string::npos) << p.err;
}

// An interpreter that has the package if its folder has a file libzero; as a script it prints its arguments.
std::string fake_python(const std::string& folder) {
  const std::string path = folder + "/python";
  std::ofstream(path) << "#!/bin/sh\nif [ $1 = -c ]; then test -e $(dirname $0)/libzero; else echo \"$RANK: $@\"; fi\n";
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}

TEST(Run, DeepSpeedsCommandLine) {
  const std::string folder = temporary_folder();
  Process::Settings settings;
  settings.environment = {"ZERO_PYTHON=" + fake_python(folder), "CUDA_VISIBLE_DEVICES="};
  std::ofstream(folder + "/libzero");
  std::ofstream(folder + "/train.py");
  settings.folder = folder;
  settings.arguments = {kZero,  "run",      "--deepspeed", "--num_accelerators", "2", "--master_port",
                        "4243", "train.py", "--module",    "--num_gpus",         "7"};
  const Ended script = run_to_end(settings);
  EXPECT_EQ(script.code, 0) << script.err;
  EXPECT_EQ(sorted(lines(script.out)),
            (std::vector<std::string>{"[0] 0: -u -m libzero.deepspeed.run train.py --module --num_gpus 7",
                                      "[1] 1: -u -m libzero.deepspeed.run train.py --module --num_gpus 7"}));
  EXPECT_TRUE(lines(script.err, "zero run: ranks:").empty()) << script.err;
  settings.arguments = {kZero, "run", "--module", "--no_local_rank", "--deepspeed", "package.train", "-x"};
  const Ended module = run_to_end(settings);
  EXPECT_EQ(module.out, "[0] 0: -u -m libzero.deepspeed.run --no_local_rank --module package.train -x\n") << module.err;
}

TEST(Run, DeepSpeedsCommandLineNeedsAnInterpreterWithThePackage) {
  const std::string folder = temporary_folder();
  const std::string python = fake_python(folder);
  Process::Settings settings;
  settings.folder = folder;
  settings.arguments = {kZero, "run", "--deepspeed", "train.py"};
  const auto fails = [&](const std::string& text) {
    const Ended p = run_to_end(settings);
    EXPECT_EQ(p.code, 2);
    EXPECT_EQ(p.out, "");
    EXPECT_NE(p.err.find(text), std::string::npos) << p.err;
  };
  settings.environment = {"ZERO_PYTHON=no-such-python"};
  fails("[--deepspeed] got no interpreter: ");
  settings.environment = {"ZERO_PYTHON=" + python};
  fails("[--deepspeed] got " + python + ", which does not find the module libzero");
  settings.environment = {"ZERO_PYTHON", "PATH=" + folder};
  std::filesystem::rename(python, folder + "/python3");
  fails("got " + folder + "/python3, which does not find the module libzero");
  std::filesystem::rename(folder + "/python3", python);
  settings.environment = {"ZERO_PYTHON=" + python};
  std::ofstream(folder + "/libzero");
  fails("got No such file or directory for train.py");
}

TEST(Run, SavePidLastsAsLongAsTheRun) {
  const std::string file = temporary_folder() + "/pid";
  Process p(run_arguments({"-n1", "--save_pid", file}, {"out=up", "sleep=20000"}));
  ASSERT_TRUE(p.wait_for("up"));
  EXPECT_EQ(file_text(file), std::to_string(p.pid()) + "\n");
  p.signal(SIGINT);
  EXPECT_EQ(p.wait(), 130);
  EXPECT_FALSE(std::filesystem::exists(file));
}

TEST(Run, JsonIsOneDocument) {
  Process p(run_arguments({"-n2", "--json"}, {"out=to stderr"}));
  EXPECT_EQ(p.wait(), 0);
  EXPECT_EQ(lines(p.out).size(), 1u);
  EXPECT_EQ(p.out.find("{\"schema\": \"zero.run/1\", \"exit_code\": 0, \"run_id\": \""), 0u) << p.out;
  EXPECT_EQ(sorted(lines(p.err, "zero run:")), (std::vector<std::string>{"[0] to stderr", "[1] to stderr"}));
}

TEST(Run, ClosedPipeEndsTheJobQuietly) {
  Process p(run_arguments({"-n2", "-q"}, {"lines=100000", "sleep=30000"}));
  ASSERT_TRUE(p.wait_for("line 5 of"));
  p.close_out();
  EXPECT_EQ(p.wait(15), 0);
  EXPECT_EQ(p.err, "");
}

TEST(Run, FullDiskOnStdoutIsExitFive) {
  Process::Settings settings;
  settings.arguments = run_arguments({"-n1"}, {"lines=10", "sleep=30000"});
  settings.out = open("/dev/full", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(settings.out, 0);
  Process p(settings);
  EXPECT_EQ(p.wait(15), 5);
  EXPECT_NE(p.err.find("No space left on device"), std::string::npos) << p.err;
  close(settings.out);
}

}  // namespace
}  // namespace zero::test::run_test
