// Process information from the variables of every launcher, as those launchers set them.
#include <gtest/gtest.h>

#include <map>

#include <zero/errors.h>

#include "net/process_info.h"

namespace zero::comm::process_info_test {
namespace {

using Variables = std::map<std::string, std::string>;

net::ProcessInfo identity(const Variables& variables) {
  return net::identity_from_env(
      [&](const std::string& name) -> std::optional<std::string> {
        const auto it = variables.find(name);
        if (it == variables.end()) return std::nullopt;
        return it->second;
      },
      [] { return std::string("123-456"); });
}

std::string error(const Variables& variables) {
  try {
    identity(variables);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
#define EXPECT_CONTAINS(text, part) EXPECT_TRUE(contains(text, part)) << text

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}
Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

const Variables kTorchrun{{"RANK", "5"},
                          {"WORLD_SIZE", "8"},
                          {"LOCAL_RANK", "1"},
                          {"LOCAL_WORLD_SIZE", "4"},
                          {"GROUP_RANK", "1"},
                          {"MASTER_ADDR", "node7"},
                          {"MASTER_PORT", "29501"},
                          {"TORCHELASTIC_RUN_ID", "none"},
                          {"TORCHELASTIC_RESTART_COUNT", "2"}};
const Variables kOneHost{{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}};
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "2"},
                         {"OMPI_COMM_WORLD_SIZE", "3"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"}};
const Variables kMpich{{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "3"}, {"MPI_LOCALNRANKS", "4"}};
const Variables kSlurm{{"SLURM_JOB_ID", "991"}, {"SLURM_STEP_ID", "2"}, {"SLURM_PROCID", "6"},
                       {"SLURM_NTASKS", "8"},   {"SLURM_LOCALID", "2"}, {"SLURM_NTASKS_PER_NODE", "4"},
                       {"SLURM_NNODES", "2"},   {"SLURM_NODEID", "1"},  {"SLURM_JOB_NODELIST", "gpu[08-09]"}};

TEST(ProcessInfo, NoLauncherIsAWorldOfOne) {
  const auto id = identity({{"PATH", "/bin"}, {"MASTER_ADDR", "left over"}});
  EXPECT_EQ(id.rank, 0);
  EXPECT_EQ(id.size, 1);
  EXPECT_EQ(id.local_rank, 0);
  EXPECT_EQ(id.local_size, 1);
  EXPECT_EQ(id.source, "no launcher");
  EXPECT_FALSE(id.launched());
  EXPECT_TRUE(id.one_host());
}

TEST(ProcessInfo, Torchrun) {
  const auto id = identity(kTorchrun);
  EXPECT_EQ(id.rank, 5);
  EXPECT_EQ(id.size, 8);
  EXPECT_EQ(id.local_rank, 1);
  EXPECT_EQ(id.local_size, 4);
  EXPECT_EQ(id.source, "torchrun environment");
  EXPECT_TRUE(id.launched());
  EXPECT_EQ(id.master_addr, "node7");
  EXPECT_EQ(id.master_port, 29501);
  EXPECT_FALSE(id.one_host());
}

TEST(ProcessInfo, ZeroRunAndTheOtherNamesOfDeepSpeed) {
  auto id = identity(with(kTorchrun, {{"ZERO_RUN_ID", "r-77"}}));
  EXPECT_EQ(id.source, "zero run");
  EXPECT_EQ(id.run_id, "r-77");
  id = identity(with(without(kTorchrun, "LOCAL_WORLD_SIZE"), {{"LOCAL_SIZE", "4"}}));
  EXPECT_EQ(id.local_size, 4);
}

TEST(ProcessInfo, AWorldOfOneNeedsNoLocalVariables) {
  const auto id = identity({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_EQ(id.size, 1);
  EXPECT_EQ(id.source, "torchrun environment");
  EXPECT_TRUE(id.launched());
}

TEST(ProcessInfo, OpenMpi) {
  const auto id = identity(kOpenMpi);
  EXPECT_EQ(id.rank, 2);
  EXPECT_EQ(id.size, 3);
  EXPECT_EQ(id.local_rank, 2);
  EXPECT_EQ(id.local_size, 3);
  EXPECT_EQ(id.source, "Open MPI");
}

TEST(ProcessInfo, MpichAndIntelMpi) {
  const auto id = identity(kMpich);
  EXPECT_EQ(id.rank, 3);
  EXPECT_EQ(id.size, 4);
  EXPECT_EQ(id.local_rank, 3);
  EXPECT_EQ(id.local_size, 4);
  EXPECT_EQ(id.source, "MPICH or Intel MPI");
}

TEST(ProcessInfo, Slurm) {
  const auto id = identity(kSlurm);
  EXPECT_EQ(id.rank, 6);
  EXPECT_EQ(id.size, 8);
  EXPECT_EQ(id.local_rank, 2);
  EXPECT_EQ(id.local_size, 4);
  EXPECT_EQ(id.source, "Slurm");
  EXPECT_EQ(id.master_addr, "gpu08");
  EXPECT_EQ(id.run_id, "slurm-991.2");
  EXPECT_GE(id.master_port, 20000);
  EXPECT_LT(id.master_port, 32000);
  // All ranks of a step compute the same port; another job gets another port.
  EXPECT_EQ(identity(with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}})).master_port, id.master_port);
  EXPECT_NE(identity(with(kSlurm, {{"SLURM_JOB_ID", "992"}})).master_port, id.master_port);
  EXPECT_EQ(identity(with(kSlurm, {{"MASTER_ADDR", "head"}, {"MASTER_PORT", "1234"}})).master_addr, "head");
  EXPECT_EQ(identity(with(kSlurm, {{"MASTER_PORT", "1234"}})).master_port, 1234);
}

TEST(ProcessInfo, SlurmTasksOfThisNode) {
  // The step's list is more accurate than the job's request.
  auto uneven =
      with(without(kSlurm, "SLURM_NTASKS_PER_NODE"),
           {{"SLURM_NNODES", "3"}, {"SLURM_STEP_TASKS_PER_NODE", "3(x2),2"}, {"SLURM_TASKS_PER_NODE", "8(x3)"}});
  for (const auto& [node, local] : std::map<std::string, int>{{"0", 3}, {"1", 3}, {"2", 2}}) {
    const auto id = identity(with(uneven, {{"SLURM_NODEID", node}, {"SLURM_LOCALID", "1"}}));
    EXPECT_EQ(id.local_size, local) << node;
  }
  EXPECT_EQ(identity(with(without(kSlurm, "SLURM_NTASKS_PER_NODE"), {{"SLURM_NNODES", "1"}})).local_size, 8);
  EXPECT_EQ(identity(with(kSlurm, {{"SLURM_NTASKS_PER_NODE", "4(x2)"}})).local_size, 4);
  // At most 4 tasks per node, 7 tasks on 2 nodes: 4 and 3, or another distribution, which cannot be inferred.
  EXPECT_CONTAINS(error(with(kSlurm, {{"SLURM_NTASKS", "7"}})), "SLURM_STEP_TASKS_PER_NODE");
  EXPECT_CONTAINS(error(with(uneven, {{"SLURM_NODEID", "3"}})), "SLURM_STEP_TASKS_PER_NODE='3(x2),2' on node 3");
}

TEST(ProcessInfo, ABatchScriptIsNotARank) {
  EXPECT_EQ(identity(without(kSlurm, "SLURM_STEP_ID")).size, 1);
  EXPECT_EQ(identity(without(kSlurm, "SLURM_STEP_ID")).source, "no launcher");
  // Numbers that Slurm keeps for batch scripts and interactive shells.
  EXPECT_EQ(identity(with(kSlurm, {{"SLURM_STEP_ID", "4294967291"}})).size, 1);
  EXPECT_EQ(identity(with(kSlurm, {{"SLURM_STEP_ID", "4294967290"}})).size, 1);
}

TEST(ProcessInfo, TheFirstCompleteSetWins) {
  Variables all = with(with(with(kOneHost, kOpenMpi), kMpich), kSlurm);
  EXPECT_EQ(identity(all).source, "torchrun environment");
  for (const auto& [name, value] : kOneHost) all.erase(name);
  EXPECT_EQ(identity(all).source, "Open MPI");
  for (const auto& [name, value] : kOpenMpi) all.erase(name);
  EXPECT_EQ(identity(all).source, "MPICH or Intel MPI");
  for (const auto& [name, value] : kMpich) all.erase(name);
  EXPECT_EQ(identity(all).source, "Slurm");
}

TEST(ProcessInfo, HalfASetNamesWhatIsMissing) {
  EXPECT_CONTAINS(error({{"RANK", "0"}}), "got RANK=0 without WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE");
  EXPECT_CONTAINS(error(without(kOneHost, "WORLD_SIZE")),
                  "without WORLD_SIZE, expected the whole set of torchrun environment");
  EXPECT_CONTAINS(error(without(kOneHost, "LOCAL_WORLD_SIZE")), "without LOCAL_WORLD_SIZE");
  EXPECT_CONTAINS(error(without(kOpenMpi, "OMPI_COMM_WORLD_RANK")), "without OMPI_COMM_WORLD_RANK");
  EXPECT_CONTAINS(error(without(kMpich, "MPI_LOCALRANKID")), "without MPI_LOCALRANKID");
  EXPECT_CONTAINS(error(without(kSlurm, "SLURM_LOCALID")), "without SLURM_LOCALID");
  const auto both = error(with(without(kOneHost, "RANK"), without(kMpich, "PMI_SIZE")));
  EXPECT_CONTAINS(both, "without RANK");
  EXPECT_CONTAINS(both, "without PMI_SIZE");
}

TEST(ProcessInfo, HalfASetMustAgreeWithACompleteOne) {
  // `srun --mpi=pmi2` sets PMI_RANK and PMI_SIZE only; scripts export WORLD_SIZE for all.
  EXPECT_EQ(identity(with(kSlurm, {{"PMI_RANK", "6"}, {"PMI_SIZE", "8"}, {"WORLD_SIZE", "8"}})).source, "Slurm");
  const auto text = error(with(kSlurm, {{"WORLD_SIZE", "16"}}));
  EXPECT_CONTAINS(text, "WORLD_SIZE=16 with SLURM_NTASKS=8");
}

TEST(ProcessInfo, ValuesThatAreNoNumbersOrOutOfRangeAllAtOnce) {
  EXPECT_CONTAINS(error(with(kOneHost, {{"RANK", "x"}})),
                  "got RANK='x', expected a whole number from 0 to 1 (WORLD_SIZE is 2)");
  EXPECT_CONTAINS(error(with(kOneHost, {{"RANK", "2"}})), "got RANK='2', expected a whole number from 0 to 1");
  EXPECT_CONTAINS(error(with(kOneHost, {{"RANK", "1.0"}})), "RANK='1.0'");
  EXPECT_CONTAINS(error(with(kOneHost, {{"RANK", " 1"}})), "RANK=' 1'");
  EXPECT_CONTAINS(error(with(kOneHost, {{"WORLD_SIZE", "99999999999999999999"}})), "WORLD_SIZE='99999999999999999999'");
  EXPECT_CONTAINS(error(with(kTorchrun, {{"MASTER_PORT", "70000"}})),
                  "got MASTER_PORT='70000', expected a whole number from 1 to 65535");
  const auto text = error({{"RANK", "-1"}, {"WORLD_SIZE", "0"}, {"LOCAL_RANK", "one"}, {"LOCAL_WORLD_SIZE", ""}});
  for (const char* part : {"RANK='-1'", "WORLD_SIZE='0'", "LOCAL_RANK='one'", "LOCAL_WORLD_SIZE=''"})
    EXPECT_CONTAINS(text, part);
  EXPECT_CONTAINS(error(with(kOneHost, {{"LOCAL_WORLD_SIZE", "3"}})),
                  "LOCAL_WORLD_SIZE='3', expected a whole number from 1 to 2");
  EXPECT_CONTAINS(error(with(kOneHost, {{"LOCAL_RANK", "2"}})), "LOCAL_RANK='2', expected a whole number from 0 to 1");
  EXPECT_CONTAINS(error(with(kSlurm, {{"SLURM_LOCALID", "4"}})),
                  "SLURM_LOCALID='4', expected a whole number from 0 to 3");
}

TEST(ProcessInfo, SeveralHostsNeedAMeetingPoint) {
  const auto text = error(without(without(kTorchrun, "MASTER_ADDR"), "MASTER_PORT"));
  EXPECT_CONTAINS(text, "without MASTER_ADDR");
  EXPECT_CONTAINS(text, "without MASTER_PORT");
  const auto wide = with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}});
  EXPECT_CONTAINS(error(wide), "without MASTER_ADDR");
  EXPECT_EQ(identity(with(wide, {{"MASTER_ADDR", "a"}})).master_port, 29500);
  EXPECT_CONTAINS(error(with(kSlurm, {{"SLURM_JOB_NODELIST", "gpu[08"}})), "SLURM_JOB_NODELIST='gpu[08'");
}

TEST(ProcessInfo, RunIds) {
  EXPECT_EQ(identity(kTorchrun).run_id, "torchelastic-none-29501-2");
  EXPECT_EQ(identity(with(kSlurm, {{"ZERO_RUN_ID", "mine"}})).run_id, "mine");
  EXPECT_EQ(identity(with(kOneHost, {{"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "4000"}})).run_id, "localhost:4000");
  EXPECT_CONTAINS(error(with(kOneHost, {{"MASTER_ADDR", "localhost"}})),
                  "got MASTER_ADDR=localhost without MASTER_PORT, expected both or none");
  EXPECT_CONTAINS(error(with(kOneHost, {{"MASTER_PORT", "4000"}})), "got MASTER_PORT=4000 without MASTER_ADDR");
  EXPECT_EQ(identity(with(kOneHost, {{"MASTER_ADDR", "localhost"}, {"ZERO_RUN_ID", "r"}})).run_id, "r");
  EXPECT_EQ(identity(kOneHost).run_id, "parent-123-456");
  EXPECT_EQ(identity(kMpich).run_id, "parent-123-456");
  EXPECT_EQ(identity(with(kOpenMpi, {{"PMIX_NAMESPACE", "prterun-host-7@1"}})).run_id, "pmix-prterun-host-7@1");
  // All ranks of a run agree.
  for (const auto* variables : {&kOneHost, &kTorchrun})
    EXPECT_EQ(identity(*variables).run_id, identity(with(*variables, {{"RANK", "0"}, {"LOCAL_RANK", "0"}})).run_id);
}

TEST(ProcessInfo, FirstSlurmHost) {
  const std::map<std::string, std::string> cases{{"a", "a"},
                                                 {"a,b", "a"},
                                                 {"a[01-03,7],b", "a01"},
                                                 {"a[7],b[1-2]", "a7"},
                                                 {"b,a[01-03]", "b"},
                                                 {"n-1.cluster[003-110]", "n-1.cluster003"},
                                                 {"rack[1-2]n[3-4]", "rack1n3"},
                                                 {"a[1-2]-ib,c", "a1-ib"},
                                                 {"a[1-2", ""},
                                                 {"a[]", ""},
                                                 {"a[x-y]", ""},
                                                 {"", ""}};
  for (const auto& [list, host] : cases) EXPECT_EQ(net::first_slurm_host(list), host) << list;
}

TEST(ProcessInfo, SlurmTasks) {
  EXPECT_EQ(net::slurm_tasks_of_node("4", 0), 4);
  EXPECT_EQ(net::slurm_tasks_of_node("4(x2)", 1), 4);
  EXPECT_EQ(net::slurm_tasks_of_node("4(x2),3", 2), 3);
  EXPECT_EQ(net::slurm_tasks_of_node("1,2(x3),5", 3), 2);
  EXPECT_EQ(net::slurm_tasks_of_node("4(x2)", 2), std::nullopt);
  for (const char* bad : {"", "x", "4(x", "4(x)", "4(2)", "0", "4,,", "-1", "4(x0)"})
    EXPECT_EQ(net::slurm_tasks_of_node(bad, 0), std::nullopt) << bad;
}

TEST(ProcessInfo, OfThisProcess) {
  // Started by a test runner, without a launcher: a world of one, unless a launcher runs the tests.
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"})
    if (std::getenv(name)) GTEST_SKIP() << "started by a launcher";
  EXPECT_EQ(net::identity_from_env().size, 1);
}

TEST(ProcessInfo, TheParentIsTheSameForAllChildren) {
  for (const auto& [name, value] : kOneHost) setenv(name.c_str(), value.c_str(), 1);
  unsetenv("ZERO_RUN_ID");
  const auto first = net::identity_from_env().run_id, second = net::identity_from_env().run_id;
  for (const auto& [name, value] : kOneHost) unsetenv(name.c_str());
  EXPECT_EQ(first, second);
  EXPECT_EQ(first.find("parent-"), 0u);
  // "parent-PID-START" with two numbers.
  EXPECT_EQ(first.find_first_not_of("0123456789-", 7), std::string::npos) << first;
  EXPECT_GT(first.size(), first.rfind('-') + 1) << first;
}

}  // namespace
}  // namespace zero::comm::process_info_test
