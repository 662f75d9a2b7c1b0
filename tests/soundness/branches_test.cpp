// Forwards whose path depends on the rank, at stage 3: correct values or an error, never a mixture of two units.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include <zero/library.h>

#include "comm/group.h"
#include "comm/transport.h"
#include "net/socket.h"
#include "support/nightly.h"
#include "support/shm_ranks.h"

namespace zero::test::branches_test {
namespace {

using namespace std::chrono_literals;

// Units of equal size; a forward uses the given ones in the given order.
struct Experts : torch::nn::Module {
  torch::nn::ModuleList list = register_module("list", torch::nn::ModuleList());
  explicit Experts(std::int64_t width) {
    for (int i = 0; i < 4; ++i) list->push_back(torch::nn::Linear(width, width));
  }
  at::Tensor forward(at::Tensor x, const std::vector<int>& way) {
    for (const int i : way) x = list[static_cast<std::size_t>(i)]->as<torch::nn::Linear>()->forward(x);
    return x;
  }
};

// Evaluates the units in `way`. The values are correct, or it throws.
void evaluate(const Comm& comm, std::int64_t width, const std::vector<int>& way) {
  at::set_num_threads(1);
  auto model = std::make_shared<Experts>(width);
  const char* const options = R"({"train_micro_batch_size_per_gpu": 2,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "zero_optimization": {"stage": 3}})";
  at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> weights;
  for (const auto& item : model->named_parameters()) {
    const auto seed = static_cast<double>(weights.size());
    item.value().copy_((at::arange(item.value().numel()) + seed).cos().view(item.value().sizes()));
    weights[item.key()] = item.value().clone();
  }
  Engine engine(model, Options::from_json(options), comm);
  const auto x = at::ones({2, width});
  auto expected = x;
  for (const int i : way) {
    const auto name = "list." + std::to_string(i);
    expected = at::linear(expected, weights.at(name + ".weight"), weights.at(name + ".bias"));
  }
  require(model->forward(x, way).equal(expected), "other values than those of the units that it used");
}

const std::vector<std::vector<std::vector<int>>> kWays{
    {{0}, {1}}, {{0, 1, 2, 3}, {0, 2, 1, 3}}, {{0, 1, 2, 3}, {0, 2, 3}}};

TEST(Branches, OverThreadsAreAnErrorThatNamesTheUnits) {
  for (const auto& way : kWays) {
    std::string error = "none";
    ThreadFaults faults;
    faults.timeout = 5s;
    try {
      run_ranks(2, faults, [&](Comm comm) { evaluate(comm, 64, way[static_cast<std::size_t>(comm->rank())]); });
    } catch (const std::exception& e) {
      error = e.what();
    }
    EXPECT_TRUE(contains(error, "got different calls") && contains(error, "list.") && contains(error, "stage 3"))
        << error;
  }
}

// Units too small to be read in place are gathered by collectives over shared memory as well.
TEST(Branches, OverSharedMemoryAreRightOrAnError) {
  for (const std::int64_t width : {16, 64}) {
    for (const auto& way : kWays) {
      const auto ends =
          with_ranks(2, [&](const Comm& comm) { evaluate(comm, width, way[static_cast<std::size_t>(comm->rank())]); });
      for (const auto& end : ends)
        EXPECT_TRUE(width == 64 ? end.ok() : contains(end.error, "got different calls") && contains(end.error, "list."))
            << end.error;
    }
  }
}

void expect_difference_named(const std::vector<RankEnd>& ends) {
  bool named = false;
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, 1) << end.error;
    EXPECT_FALSE(contains(end.error, "other values")) << end.error;
    EXPECT_LT(end.seconds, 60) << end.error;  // not at the time limit
    named |= contains(end.error, "got different calls") && contains(end.error, "list.");
  }
  EXPECT_TRUE(named) << errors_of(ends);
}

// A difference is found long before the time limit, here 30 minutes.
TEST(Branches, OverTcpAreAnErrorThatNamesTheUnits) {
  OneIn part(2);
  for (const auto& way : kWays) {
    if (!part.take()) continue;
    const auto run_id = fresh_run_id();
    expect_difference_named(fork_ranks(2, [&](int rank) {
      const auto comm = comm::make_communicator(comm::make_gloo(identity_of(run_id, rank, 2), 30min));
      evaluate(comm, 64, way[static_cast<std::size_t>(rank)]);
    }));
  }
}

TEST(Branches, OverSharedMemoryAndTcpAreAnErrorThatNamesTheUnits) {
  for (const auto& way : kWays) {
    const auto run_id = fresh_run_id();
    net::MeetingPoint point{"", "127.0.0.1", 0};
    net::listen_at(point);
    expect_difference_named(fork_ranks(4, [&](int rank) {
      at::set_num_threads(1);
      auto identity = identity_of(run_id, rank, 4);
      identity.local_rank = rank % 2, identity.local_size = 2;
      identity.master_addr = "127.0.0.1", identity.master_port = point.port;
      const auto comm = comm::make_communicator(comm::make_shm_gloo(identity, 30min, true));
      evaluate(comm, 64, way[static_cast<std::size_t>(rank / 2)]);  // each host another way
    }));
  }
}

}  // namespace
}  // namespace zero::test::branches_test
