// A program that calls Communicator::from_env() runs unchanged under torchrun: on one host, and as two nodes that
// connect through torchrun's agent store. Skipped if python3 (or ZERO_TEST_PYTHON) cannot import torch.distributed.run.
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <zero/communicator.h>

#include "net/socket.h"
#include "support/collective_checks.h"

namespace torchrun_test {
namespace {

std::string python() {
  const char* chosen = std::getenv("ZERO_TEST_PYTHON");
  return chosen == nullptr ? "python3" : chosen;
}

bool has_torchrun() {
  return std::system((python() + " -c 'import torch.distributed.run' >/dev/null 2>&1").c_str()) == 0;
}

// Runs DISABLED_ProgramOfOneRank below in every rank; the exit status of torchrun.
int torchrun(const std::string& options, const std::string& environment) {
  char self[4096] = "";
  if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) throw std::runtime_error("no /proc/self/exe");
  const auto command = environment + " timeout -k 5 100 " + python() + " -m torch.distributed.run --no-python " +
                       options + " " + self +
                       " --gtest_also_run_disabled_tests --gtest_filter=Torchrun.DISABLED_ProgramOfOneRank >&2";
  return std::system(command.c_str());
}

int free_port() {
  zero::net::MeetingPoint point{"", "127.0.0.1", 0};
  zero::net::listen_at(point);
  return point.port;
}

}  // namespace

TEST(Torchrun, DISABLED_ProgramOfOneRank) {
  const char* expected = std::getenv("EXPECTED_TRANSPORT");
  ASSERT_NE(expected, nullptr) << "this is a rank's program, started by the other tests";
  auto communicator = zero::Communicator::from_env();
  EXPECT_EQ(communicator->transport(), expected);
  EXPECT_EQ(communicator->size(), 2);
  zero::test::check_exchange(communicator);
  zero::test::check_random_program(communicator, 7, 20);
}

TEST(Torchrun, RanksOfOneHost) {
  if (!has_torchrun())
    GTEST_SKIP() << python() << " cannot import torch.distributed.run (set ZERO_TEST_PYTHON to one that can)";
  for (const std::string transport : {"shm", "gloo"}) {
    EXPECT_EQ(torchrun("--nproc-per-node 2 --master-port " + std::to_string(free_port()),
                       "EXPECTED_TRANSPORT=" + transport + " ZERO_TRANSPORT=" + transport + " ZERO_TIMEOUT_S=60"),
              0);
  }
}

TEST(Torchrun, TwoNodesMeetByTheAgentsStore) {
  if (!has_torchrun())
    GTEST_SKIP() << python() << " cannot import torch.distributed.run (set ZERO_TEST_PYTHON to one that can)";
  const auto common =
      "--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port " + std::to_string(free_port());
  const std::string environment = "ZERO_TOKEN=ours EXPECTED_TRANSPORT=gloo ZERO_TRANSPORT=gloo ZERO_TIMEOUT_S=60";
  int status = -1;
  std::thread second([&] { status = torchrun(common + " --node-rank 1", environment); });
  EXPECT_EQ(torchrun(common + " --node-rank 0", environment), 0);
  second.join();
  EXPECT_EQ(status, 0);
}

}  // namespace torchrun_test
