// Ranks that share a GPU: the staged transport and the engine over it. The first tests need no GPU: host tensors take
// the same way through it.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <zero/device.h>
#include <zero/errors.h>

#include "comm/group.h"
#include "comm/transport.h"
#include "gpu/device.h"
#include "parity/training.h"
#include "support/collective_checks.h"
#include "support/folder.h"
#include "support/fork_ranks.h"

namespace zero::test::shared_test {
namespace {

net::ProcessInfo identity(int rank, int size, const std::string& run) {
  net::ProcessInfo id;
  id.rank = id.local_rank = rank;
  id.size = id.local_size = size;
  id.run_id = run;
  return id;
}

std::shared_ptr<Communicator> staged(int rank, int size, const std::string& run) {
  return comm::make_communicator(
      comm::make_staged(comm::make_shm(identity(rank, size, run), std::chrono::seconds(60))));
}

void require(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error(text);
}

#define ZERO_NEEDS_A_GPU_TO_SHARE() \
  if (gpus_in_child() == 0) GTEST_SKIP() << "no GPU, or no CUDA driver (libcuda.so.1), on this machine"

// The same bits from run to run, also of attention's backward.
void be_deterministic() {
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
  at::globalContext().setAllowTF32CuBLAS(false);
  at::globalContext().setAllowTF32CuDNN(false);
}

Training of(const std::string& recipe, int stage, at::Device device) {
  Training setup;
  setup.recipe = recipe;
  setup.stage = stage;
  setup.steps = 4;
  setup.clip = 0.5;
  setup.device = device;
  return setup;
}

std::string name_of(const Training& setup) {
  return setup.problem + " " + setup.recipe + ", stage " + std::to_string(setup.stage) + ", accumulation " +
         std::to_string(setup.accumulation) + " " + setup.zero;
}

void require_same(const Training& setup, const Outcome& got, const Outcome& expected) {
  require(got.hash == expected.hash && got.norms == expected.norms && got.losses == expected.losses,
          name_of(setup) + ": other bits than the first run's");
}

// Over all stages: with accumulation, stages 0 and 1 add the micro-batches first, stages 2 and 3 the ranks.
void check_stages(const std::shared_ptr<Communicator>& comm, at::Device device) {
  for (const char* recipe : {"fp32", "bf16", "fp16"})
    for (const char* problem : {"gpt", "frozen", "branches", "reused"})
      for (const int accumulation : {1, 2}) {
        Outcome first;
        for (const int stage : {0, 1, 2, 3}) {
          auto setup = of(recipe, stage, device);
          setup.problem = problem;
          setup.accumulation = accumulation;
          auto run = train_rank(setup, comm);
          if (stage == 0 || (stage == 2 && accumulation > 1))
            first = std::move(run);
          else
            require_same(setup, run, first);
        }
      }
}

// Where states rest does not change a bit.
void check_tiers(const std::shared_ptr<Communicator>& comm, at::Device device, const std::string& folder) {
  const std::string nvme = R"({"device": "nvme", "nvme_path": ")" + folder + "\"}";
  const std::string cpu = R"({"device": "cpu"})", pinned = R"({"device": "cpu", "pin_memory": true})";
  for (const char* recipe : {"fp32", "bf16"})
    for (const int accumulation : {1, 2})
      for (const int stage : {2, 3}) {
        auto setup = of(recipe, stage, device);
        setup.accumulation = accumulation;
        const auto first = train_rank(setup, comm);
        for (const auto& optimizer : {cpu, pinned, nvme}) {
          setup.zero = ", \"offload_optimizer\": " + optimizer;
          require_same(setup, train_rank(setup, comm), first);
          if (stage < 3) continue;
          for (const auto& param : {cpu, pinned, nvme}) {
            setup.zero = ", \"offload_optimizer\": " + optimizer + ", \"offload_param\": " + param;
            require_same(setup, train_rank(setup, comm), first);
          }
        }
      }
}

// A delayed update is another computation; stages agree on it.
void check_delayed(const std::shared_ptr<Communicator>& comm, at::Device device) {
  Outcome first;
  for (const int stage : {1, 2, 3}) {
    auto setup = of("bf16", stage, device);
    setup.zero = R"(, "offload_optimizer": {"device": "cpu"}, "delayed_update": {"enabled": true})";
    auto run = train_rank(setup, comm);
    if (stage == 1)
      first = std::move(run);
    else
      require_same(setup, run, first);
  }
}

const auto kLimit = std::chrono::seconds(150);

// What two ranks on one GPU said that failed; "" if none did.
std::string errors_on_gpu(const std::function<void(const std::shared_ptr<Communicator>&, at::Device)>& body) {
  const auto run = fresh_run_id();
  return errors_of(fork_ranks(
      2,
      [&](int rank) {
        // libtorch makes its threads again after a fork, at their first use, which two threads must not do at once.
        at::set_num_threads(at::get_num_threads());
        const auto comm = staged(rank, 2, run);
        const auto device = default_device(*comm);
        require(device.is_cuda() && device.index() == 0, why_no_gpu(*comm));
        be_deterministic();
        body(comm, device);
        if (simulated_faults)
          for (const auto& fault : simulated_faults()) throw std::runtime_error(fault);
      },
      kLimit));
}

}  // namespace

TEST(Staged, EveryCollectiveMatchesTheNaiveOne) {
  const auto run = fresh_run_id();
  EXPECT_EQ(errors_of(fork_ranks(3,
                                 [&](int rank) {
                                   const auto comm = staged(rank, 3, run);
                                   require(comm->transport() == "staged shm", comm->transport());
                                   check_values(comm);
                                   check_exchange(comm);
                                   check_in_flight(comm);
                                   check_values(comm->split(0, -rank));
                                 })),
            "");
}

TEST(Staged, TrainingHasTheBitsOfTheHostsTransport) {
  const auto run = fresh_run_id();
  EXPECT_EQ(errors_of(fork_ranks(2,
                                 [&](int rank) {
                                   at::set_num_threads(1);
                                   const auto comm = staged(rank, 2, run);
                                   const auto host = comm::make_communicator(
                                       comm::make_shm(identity(rank, 2, run + "-host"), std::chrono::seconds(60)));
                                   for (const int stage : {0, 1, 2, 3}) {
                                     const auto setup = of("bf16", stage, at::kCPU);
                                     require_same(setup, train_rank(setup, comm), train_rank(setup, host));
                                   }
                                 })),
            "");
}

// What the GPU's tests below compare, on host memory: so that a fault of theirs is seen without a GPU.
TEST(Staged, StagesAndTiersAgreeOnHostMemory) {
  const auto run = fresh_run_id();
  const TempFolder folder;
  EXPECT_EQ(errors_of(fork_ranks(
                2,
                [&](int rank) {
                  at::set_num_threads(1);
                  const auto comm = staged(rank, 2, run);
                  check_stages(comm, at::kCPU);
                  check_tiers(comm, at::kCPU, folder.path());
                  check_delayed(comm, at::kCPU);
                },
                kLimit)),
            "");
}

TEST(Staged, AKilledRankIsNamed) {
  const auto run = fresh_run_id();
  const auto ends = fork_ranks(2, [&](int rank) {
    const auto comm = staged(rank, 2, run);
    comm->barrier();
    if (rank == 1) raise(SIGKILL);
    auto values = at::ones({100});
    comm->all_reduce(values)->wait();
  });
  EXPECT_EQ(ends[0].blamed, 1) << ends[0].error;
}

// The sums are the host transport's: in fp32, rank by rank, rounded once.
TEST(SharedGpu, SumsHaveTheBitsOfTheCpusRanks) {
  ZERO_NEEDS_A_GPU_TO_SHARE();
  EXPECT_EQ(errors_on_gpu([](const auto& comm, at::Device device) {
              for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
                std::vector<at::Tensor> all;
                torch::manual_seed(7);
                for (int r = 0; r < 2; ++r) all.push_back(at::randn({100002}).to(dtype));
                const auto& own = all[static_cast<std::size_t>(comm->rank())];
                const auto sum = (all[0].to(at::kFloat) + all[1].to(at::kFloat)).to(dtype);
                auto inout = own.to(device);
                comm->all_reduce(inout)->wait();
                require(at::equal(inout.cpu(), sum), "all_reduce: other bits");
                auto part = at::empty({50001}, inout.options());
                comm->reduce_scatter(part, own.to(device))->wait();
                require(at::equal(part.cpu(), sum.narrow(0, comm->rank() * 50001, 50001)),
                        "reduce_scatter: other bits");
              }
            }),
            "");
}

TEST(SharedGpu, EveryStageHasTheSameBits) {
  ZERO_NEEDS_A_GPU_TO_SHARE();
  EXPECT_EQ(errors_on_gpu(check_stages), "");
}

TEST(SharedGpu, EveryTierHasTheSameBits) {
  ZERO_NEEDS_A_GPU_TO_SHARE();
  const TempFolder folder;
  EXPECT_EQ(errors_on_gpu([&](const auto& comm, at::Device device) {
              check_tiers(comm, device, folder.path());
              check_delayed(comm, device);
            }),
            "");
}

// A rank whose shards are padding takes the same collectives as the others.
TEST(SharedGpu, ARankWithoutElementsGoesAlong) {
  ZERO_NEEDS_A_GPU_TO_SHARE();
  EXPECT_EQ(errors_on_gpu([](const auto& comm, at::Device device) {
              for (const int stage : {0, 1, 2, 3}) {
                torch::nn::Sequential one(torch::nn::Linear(torch::nn::LinearOptions(1, 1).bias(false)));
                one->to(device);
                Engine engine(one.ptr(), Options::from_json(json_of(of("fp32", stage, device))), comm);
                for (int step = 0; step < 2; ++step) {
                  engine.backward(one->forward(at::ones({2, 1}).to(device)).square().mean());
                  require(engine.step().updated, "no update at stage " + std::to_string(stage));
                }
              }
            }),
            "");
}

// zero::build with a device: the values of a model that is built in host memory and moved, also where ranks have seeded
// differently.
TEST(SharedGpu, AModelIsBuiltOntoTheGpu) {
  ZERO_NEEDS_A_GPU_TO_SHARE();
  EXPECT_EQ(errors_on_gpu([](const auto& comm, at::Device device) {
              const auto make = [] {
                torch::nn::Sequential layers;
                for (int layer = 0; layer < 4; ++layer) layers->push_back(torch::nn::Linear(48, 48));
                return layers.ptr();
              };
              for (const int stage : {0, 1, 2, 3}) {
                const auto options = Options::from_json(json_of(of("bf16", stage, device)));
                torch::manual_seed(3 + static_cast<std::uint64_t>(comm->rank()));
                const auto moved = make();
                moved->to(device);
                const auto expected = Engine(moved, options, comm).state_hash();
                torch::manual_seed(3 + static_cast<std::uint64_t>(comm->rank()));
                const auto built = build(make, device);
                Engine engine(built, options, comm);
                require(engine.state_hash() == expected, "other values at stage " + std::to_string(stage));
                for (const auto& parameter : built->parameters())
                  require(parameter.device() == device, "a parameter on " + parameter.device().str());
              }
            }),
            "");
}

// libtorch on a CPU adds the products of a matrix in another order than cuBLAS, so a step differs in fp32's last
// places.
TEST(SharedGpu, TwoRanksStayNearTheCpusRanks) {
  ZERO_NEEDS_A_GPU_TO_SHARE();
  EXPECT_EQ(errors_on_gpu([](const auto& comm, at::Device device) {
              for (const char* problem : {"gpt", "mlp", "branches"}) {
                auto setup = of("fp32", 3, device);
                setup.problem = problem;
                setup.steps = 10;
                setup.optimizer = R"({"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}})";
                const auto there = train_rank(setup, comm);
                setup.device = at::kCPU;
                const auto here = train_rank(setup, comm);
                const auto far = distance(there.masters, here.masters, 0.1);
                require(far < 1e-3, std::string(problem) + ": parameters differ by " + std::to_string(far));
              }
            }),
            "");
}

// Before any library reads it: cuBLAS is deterministic with a fixed work space.
const bool kEnvironment = setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0) == 0;

}  // namespace zero::test::shared_test
