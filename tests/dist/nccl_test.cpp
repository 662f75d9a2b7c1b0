// The nccl transport: without GPUs the error names what is missing; with GPUs every collective is compared with a naive
// one, one rank per GPU.
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <string>

#include <gtest/gtest.h>
#include <torch/types.h>
#include <zero/errors.h>

#include "comm/group.h"
#include "comm/transport.h"
#include "gpu/device.h"
#include "support/collective_checks.h"
#include "support/fork_ranks.h"

namespace comm = zero::comm;
namespace net = zero::net;

namespace nccl_test {
namespace {

net::ProcessInfo identity(int rank, int size) {
  net::ProcessInfo id;
  id.rank = id.local_rank = rank;
  id.size = id.local_size = size;
  id.run_id = "nccl-test-" + std::to_string(getppid());
  return id;
}

}  // namespace

TEST(Nccl, WithoutAGpuTheRefusalSaysWhatIsMissingAndWhatToDo) {
  if (zero::test::gpus_in_child() > 0) GTEST_SKIP() << "this machine has a GPU";
  try {
    comm::make_nccl(identity(0, 2), std::chrono::seconds(5));
    FAIL() << "a transport without a GPU";
  } catch (const zero::ConfigError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("libcuda.so.1"), std::string::npos) << text;
    EXPECT_NE(text.find("Hint: use transport shm or gloo"), std::string::npos) << text;
  }
}

TEST(Nccl, EveryCollectiveMatchesTheNaiveOne) {
  const int count = zero::test::gpus_in_child();
  if (count == 0) GTEST_SKIP() << "no GPU on this machine (libcuda.so.1 is absent or shows none)";
  const int size = std::min(count, 4);
  const auto ends = zero::test::fork_ranks(size, [&](int rank) {
    auto communicator = comm::make_communicator(comm::make_nccl(identity(rank, size), std::chrono::seconds(60)));
    if (communicator->transport() != "nccl") throw std::runtime_error("transport " + communicator->transport());
    zero::test::check_values(communicator);
    zero::test::check_exchange(communicator);
    zero::test::check_in_flight(communicator);
    if (size == 4)  // rows and columns of a grid
      for (const int color : {rank / 2, rank % 2}) {
        const auto group = communicator->split(color, rank, "tp");
        zero::test::check_values(group);
        zero::test::check_exchange(group);
        zero::test::check_values(communicator);
      }
    const auto device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(rank));
    auto sum = torch::full({1001}, rank + 1.0f, device);
    communicator->all_reduce(sum)->wait();
    const float expected = static_cast<float>(size * (size + 1)) / 2;
    if (!sum.eq(expected).all().item<bool>()) throw std::runtime_error("a wrong sum on the device");
  });
  EXPECT_EQ(zero::test::errors_of(ends), "");
}

TEST(Nccl, NamesAKilledRank) {
  const int count = zero::test::gpus_in_child();
  if (count < 2) GTEST_SKIP() << count << " GPUs on this machine, expected 2 or more";
  const auto ends = zero::test::fork_ranks(2, [&](int rank) {
    const auto communicator = comm::make_communicator(comm::make_nccl(identity(rank, 2), std::chrono::seconds(60)));
    communicator->barrier();
    if (rank == 1) raise(SIGKILL);
    communicator->barrier();
  });
  EXPECT_EQ(ends[1].signal, SIGKILL);
  EXPECT_EQ(ends[0].blamed, 1) << ends[0].error;
}

}  // namespace nccl_test
