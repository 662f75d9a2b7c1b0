// Communicator::from_env in processes: with each launcher's variables, ranks connect over the requested or selected
// transport.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <stdexcept>

#include <zero/communicator.h>
#include <zero/errors.h>

#include "support/collective_checks.h"
#include "support/fork_ranks.h"

namespace zero::identity_processes_test {
namespace {

using Variables = std::map<std::string, std::string>;

const std::vector<const char*> kAll{"RANK",
                                    "WORLD_SIZE",
                                    "LOCAL_RANK",
                                    "LOCAL_WORLD_SIZE",
                                    "LOCAL_SIZE",
                                    "MASTER_ADDR",
                                    "MASTER_PORT",
                                    "TORCHELASTIC_RUN_ID",
                                    "ZERO_RUN_ID",
                                    "ZERO_TRANSPORT",
                                    "ZERO_TIMEOUT_S",
                                    "OMPI_COMM_WORLD_RANK",
                                    "PMI_RANK",
                                    "PMI_SIZE",
                                    "OMPI_COMM_WORLD_SIZE",
                                    "SLURM_STEP_ID",
                                    "PMIX_NAMESPACE",
                                    "TORCHELASTIC_USE_AGENT_STORE"};

void set_only(const Variables& variables) {
  for (const char* name : kAll) unsetenv(name);
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
}

Variables torchrun(int rank, int size) {
  const auto r = std::to_string(rank), n = std::to_string(size);
  return {{"RANK", r}, {"WORLD_SIZE", n}, {"LOCAL_RANK", r}, {"LOCAL_WORLD_SIZE", n}};
}

void require(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error(text);
}

void expect_all_well(const std::vector<test::RankEnd>& ends) {
  for (const auto& end : ends) EXPECT_TRUE(end.ok()) << test::errors_of(ends);
}

TEST(FromEnv, EachTransportByName) {
  for (const std::string transport : {"shm", "gloo"}) {
    const auto run = test::fresh_run_id();
    expect_all_well(test::fork_ranks(3, [&](int rank) {
      auto variables = torchrun(rank, 3);
      variables["ZERO_RUN_ID"] = run;
      variables["ZERO_TRANSPORT"] = transport;
      variables["ZERO_TIMEOUT_S"] = "45.5";
      set_only(variables);
      auto comm = Communicator::from_env();
      require(comm->transport() == transport, "transport " + comm->transport());
      require(comm->rank() == rank && comm->size() == 3 && comm->local_rank() == rank && comm->local_size() == 3,
              "another rank");
      require(comm->timeout() == std::chrono::milliseconds(45500), "another timeout");
      test::check_random_program(comm, 3, 20);
      test::check_exchange(comm);
    }));
  }
}

TEST(FromEnv, OneHostWithoutAnythingElseSharesMemory) {
  // No run id and no address: the run is identified by the common parent process.
  expect_all_well(test::fork_ranks(2, [&](int rank) {
    set_only(torchrun(rank, 2));
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    auto comm = Communicator::from_env();
    require(comm->transport() == "shm", "transport " + comm->transport());
    test::check_random_program(comm, 4, 20);
  }));
}

TEST(FromEnv, OpenMpiAndMpich) {
  for (const bool open_mpi : {true, false}) {
    const auto run = test::fresh_run_id();
    expect_all_well(test::fork_ranks(2, [&](int rank) {
      const auto r = std::to_string(rank);
      const Variables open{{"OMPI_COMM_WORLD_RANK", r},
                           {"OMPI_COMM_WORLD_SIZE", "2"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", r},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                           {"PMIX_NAMESPACE", run}};
      const Variables mpich{
          {"PMI_RANK", r}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", r}, {"MPI_LOCALNRANKS", "2"}, {"ZERO_RUN_ID", run}};
      set_only(open_mpi ? open : mpich);
      setenv("CUDA_VISIBLE_DEVICES", "", 1);
      auto comm = Communicator::from_env();
      require(comm->size() == 2 && comm->rank() == rank, "another rank");
      test::check_random_program(comm, 6, 20);
    }));
  }
}

TEST(FromEnv, AWorldOfOneNeedsNoTransport) {
  expect_all_well(test::fork_ranks(1, [](int) {
    set_only({});
    require(Communicator::from_env()->transport() == "local", "not local");
    set_only({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"ZERO_TRANSPORT", "shm"}, {"ZERO_TIMEOUT_S", "7"}});
    auto comm = Communicator::from_env();
    require(comm->transport() == "local" && comm->timeout() == std::chrono::seconds(7),
            "not local, or another timeout");
    test::check_random_program(comm, 5, 20);
  }));
}

TEST(FromEnv, TwoRunsAtOnceDoNotMeet) {
  const std::vector<std::string> runs{test::fresh_run_id(), test::fresh_run_id()};
  expect_all_well(test::fork_ranks(4, [&](int process) {
    const int rank = process / 2;
    auto variables = torchrun(rank, 2);
    variables["ZERO_RUN_ID"] = runs[static_cast<std::size_t>(process % 2)];
    variables["ZERO_TRANSPORT"] = "shm";
    set_only(variables);
    auto comm = Communicator::from_env();
    for (const auto& text : comm->all_gather_bytes(std::to_string(process % 2)))
      require(text == std::to_string(process % 2), "met a rank of the other run");
  }));
}

TEST(FromEnv, WhatIsWrongIsToldBeforeAnybodyIsWaitedFor) {
  const auto ends = test::fork_ranks(
      3,
      [](int process) {
        auto variables = torchrun(0, 2);
        if (process == 0) variables.erase("WORLD_SIZE");
        if (process == 1) variables["ZERO_TRANSPORT"] = "shmem";
        if (process == 2) variables["ZERO_TIMEOUT_S"] = "soon";
        set_only(variables);
        Communicator::from_env();
      },
      std::chrono::seconds(20));
  EXPECT_NE(ends[0].error.find("without WORLD_SIZE"), std::string::npos) << ends[0].error;
  EXPECT_NE(ends[1].error.find("did you mean 'shm'?"), std::string::npos) << ends[1].error;
  EXPECT_NE(ends[2].error.find("ZERO_TIMEOUT_S='soon'"), std::string::npos) << ends[2].error;
}

TEST(FromEnv, RanksThatDoNotComeAreNamed) {
  for (const std::string transport : {"shm", "gloo"}) {
    const auto run = test::fresh_run_id();
    const auto ends = test::fork_ranks(2, [&](int rank) {
      auto variables = torchrun(rank, 3);
      variables["ZERO_RUN_ID"] = run;
      variables["ZERO_TRANSPORT"] = transport;
      variables["ZERO_TIMEOUT_S"] = "1.5";
      set_only(variables);
      Communicator::from_env();
    });
    for (const auto& end : ends) {
      EXPECT_FALSE(end.ok());
      EXPECT_NE(end.error.find("rank 2"), std::string::npos) << transport << ": " << end.error;
    }
  }
}

}  // namespace
}  // namespace zero::identity_processes_test
