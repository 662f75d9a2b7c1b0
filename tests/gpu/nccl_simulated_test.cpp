// The transport "nccl" with a simulated NCCL between processes that each have a simulated GPU: its results, the order
// of its streams, which waits block the host, and what becomes of operations that never end.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <zero/device.h>
#include <zero/errors.h>

#include "comm/group.h"
#include "comm/nccl/rank_sum.h"
#include "comm/transport.h"
#include "gpu/device.h"
#include "gpu/simulated_gpu.h"
#include "gpu/simulated_nccl.h"
#include "parity/training.h"
#include "support/collective_checks.h"
#include "support/fork_ranks.h"
#include "support/nightly.h"

namespace zero::test::nccl_simulated_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

void require(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error(text);
}

net::ProcessInfo identity(int rank, int size, const std::string& run) {
  net::ProcessInfo id;
  id.rank = id.local_rank = rank;
  id.size = id.local_size = size;
  id.run_id = run;
  return id;
}

using Body = std::function<void(const std::shared_ptr<Communicator>& comm, at::Device device)>;

// `size` ranks with a GPU each. No rank may leave an access without order.
std::vector<RankEnd> ranks(int size, const Body& body, milliseconds timeout = seconds(60)) {
  const auto run = fresh_run_id();
  simulated_nccl::connect(size);
  return fork_ranks(
      size,
      [&](int rank) {
        simulated_nccl::be_rank(rank);
        const auto comm = comm::make_communicator(comm::make_nccl(identity(rank, size, run), timeout));
        const auto device = default_device(*comm);
        require(device == at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(rank)), why_no_gpu(*comm));
        body(comm, device);
        for (const auto& fault : simulated_gpu::take_faults()) throw std::runtime_error(fault);
      },
      seconds(150));
}

std::string errors(int size, const Body& body) { return errors_of(ranks(size, body)); }

std::int64_t host_waits(const std::vector<std::string>& operations) {
  return std::count(operations.begin(), operations.end(), "host waits");
}

std::string lines(const std::vector<std::string>& operations) {
  return std::accumulate(operations.begin(), operations.end(), std::string(),
                         [](const auto& all, const auto& each) { return all + "\n" + each; });
}

at::Tensor values_of(int rank, std::int64_t numel, at::ScalarType dtype) {
  return (at::arange(numel, at::kFloat) * 0.37 + 1.9 * rank).sin().to(dtype);
}

}  // namespace

TEST(SimulatedNccl, EveryCollectiveOfHostTensorsMatchesTheNaiveOne) {
  EXPECT_EQ(errors(3,
                   [](const auto& comm, at::Device) {
                     require(comm->transport() == "nccl", comm->transport());
                     check_values(comm);
                     check_exchange(comm);
                     check_in_flight(comm);
                     const auto group = comm->split(comm->rank() == 1 ? 1 : 0, -comm->rank(), "tp");
                     check_values(group);
                     check_exchange(group);
                     check_values(comm);
                   }),
            "");
}

// Results on the GPU are used by later work on the stream; only reading them blocks the host.
TEST(SimulatedNccl, CollectivesOfGpuTensorsMatchTheNaiveOnesAndNeverBlockTheHost) {
  EXPECT_EQ(errors(3,
                   [](const auto& comm, at::Device device) {
                     const int rank = comm->rank(), size = comm->size();
                     for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf})
                       for (const std::int64_t part : {1, 77, 4096}) {
                         const auto numel = part * size;
                         std::vector<at::Tensor> all;
                         auto sum = at::zeros({numel}, at::kFloat);
                         for (int r = 0; r < size; ++r) {
                           all.push_back(values_of(r, numel, dtype));
                           sum += all.back().to(at::kFloat);
                         }
                         const auto own = all[static_cast<std::size_t>(rank)];
                         const auto there = own.to(device);
                         simulated_gpu::take_operations();
                         auto gathered = at::empty({numel * size}, there.options());
                         auto reduced = at::empty({part}, there.options()), exchanged = at::empty_like(there);
                         auto total = there.clone(), odd = there.narrow(0, 0, numel - 1).clone(), sent = there.clone();
                         comm->all_gather(gathered, there)->wait();
                         comm->reduce_scatter(reduced, there)->wait();
                         comm->all_reduce(total)->wait();
                         comm->all_reduce(odd)->wait();
                         comm->broadcast(sent, 1)->wait();
                         comm->all_to_all(exchanged, there)->wait();
                         const auto later = gathered * 2;  // on the caller's stream
                         const auto operations = simulated_gpu::take_operations();
                         require(host_waits(operations) == 0, "the host waited:" + lines(operations));
                         require(at::equal(gathered.cpu(), at::cat(all)), "all_gather");
                         require(at::equal(later.cpu(), at::cat(all) * 2), "work after all_gather");
                         const auto rounded = sum.to(dtype);
                         require(at::equal(reduced.cpu(), rounded.narrow(0, part * rank, part)), "reduce_scatter");
                         require(at::equal(total.cpu(), rounded), "all_reduce");
                         require(at::equal(odd.cpu(), rounded.narrow(0, 0, numel - 1)), "all_reduce of odd parts");
                         require(at::equal(sent.cpu(), all[1]), "broadcast");
                         std::vector<at::Tensor> theirs;
                         for (const auto& each : all) theirs.push_back(each.narrow(0, part * rank, part));
                         require(at::equal(exchanged.cpu(), at::cat(theirs)), "all_to_all");
                       }
                   }),
            "");
}

// One kernel sums all ranks' parts; more than it takes are summed one by one, with the same bits.
TEST(SimulatedNccl, SumsHaveTheSameBitsByOneKernelAndByMany) {
  EXPECT_EQ(errors(1,
                   [](const auto&, at::Device device) {
                     for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
                       std::vector<at::Tensor> parts;
                       auto sum = at::zeros({1001}, at::kFloat);
                       for (int r = 0; r < 5; ++r) {
                         const auto part = values_of(r, 1001, dtype);
                         parts.push_back(part.to(device));
                         sum += part.to(at::kFloat);
                       }
                       for (const int most : {5, 4}) {
                         auto out = at::empty_like(parts[0]);
                         simulated_gpu::take_operations();
                         comm::nccl::sum_in_order(out, parts, most);
                         const auto operations = simulated_gpu::take_operations();
                         require(operations.size() == (most == 5 ? 1 : 6), "operations:" + lines(operations));
                         require(at::equal(out.cpu(), sum.to(dtype)), "other bits than a loop's");
                       }
                     }
                   }),
            "");
}

// The bits of the CPU's ranks, which share memory, at all stages and tiers. (Not with attention: libtorch computes it
// in another way on a GPU.)
TEST(SimulatedNccl, TrainingHasTheBitsOfTheCpusRanks) {
  const auto host_run = fresh_run_id();
  const std::string pinned = R"(, "offload_optimizer": {"device": "cpu", "pin_memory": true})";
  const std::string params = pinned + R"(, "offload_param": {"device": "cpu", "pin_memory": true})";
  EXPECT_EQ(errors(2,
                   [&](const auto& comm, at::Device device) {
                     at::set_num_threads(1);
                     simulated_gpu::answer_queries_with(comm->rank() == 1);  // the ranks differ in speed
                     const auto host =
                         comm::make_communicator(comm::make_shm(identity(comm->rank(), 2, host_run), seconds(60)));
                     OneIn part(5);
                     for (const char* problem : {"mlp", "branches", "reused"})
                       for (const char* recipe : {"fp32", "bf16"})
                         for (const auto& zero : {std::string(), pinned, params})
                           for (const int stage : {0, 1, 2, 3})
                             for (const int accumulation : {1, 2}) {
                               if ((stage == 0 && !zero.empty()) || (stage < 3 && zero == params))
                                 continue;  // nothing to offload
                               if (!part.take()) continue;
                               Training setup;
                               setup.problem = problem;
                               setup.recipe = recipe;
                               setup.zero = zero;
                               setup.stage = stage;
                               setup.accumulation = accumulation;
                               setup.steps = 3;
                               setup.clip = 0.5;
                               const auto here = train_rank(setup, host);
                               setup.device = device;
                               const auto there = train_rank(setup, comm);
                               const auto name =
                                   setup.problem + " " + recipe + zero + ", stage " + std::to_string(stage) + ": ";
                               std::string first;
                               require(equal_bits(there.masters, here.masters, &first), name + first);
                               require(here.losses == there.losses, name + "other losses");
                               // Shards are aligned for a GPU, so ranks add other elements' squares.
                               for (std::size_t step = 0; step < here.norms.size(); ++step)
                                 require(std::abs(here.norms[step] - there.norms[step]) <= 1e-12 * here.norms[step],
                                         name + "another norm");
                             }
                   }),
            "");
}

// A step at stage 3: gathers, reductions and the norm are ordered on streams. The host waits once, for the norm that
// StepResult has.
TEST(SimulatedNccl, AStepBlocksTheHostOnce) {
  EXPECT_EQ(errors(2,
                   [](const auto& comm, at::Device device) {
                     torch::nn::Sequential layers;
                     for (int layer = 0; layer < 4; ++layer) layers->push_back(torch::nn::Linear(64, 64));
                     layers->to(device);
                     const auto options = Options::from_json(R"({"train_micro_batch_size_per_gpu": 2,
                       "bf16": {"enabled": true}, "gradient_clipping": 1.0,
                       "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
                       "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})");
                     Engine engine(layers.ptr(), options, comm);
                     const auto x = at::ones({2, 64}, at::TensorOptions().dtype(at::kBFloat16).device(device));
                     for (int step = 0; step < 3; ++step) {
                       simulated_gpu::take_operations();
                       engine.backward(layers->forward(x).square().mean());
                       auto operations = simulated_gpu::take_operations();
                       require(host_waits(operations) == 0, "before the step:" + lines(operations));
                       engine.step();
                       operations = simulated_gpu::take_operations();
                       require(host_waits(operations) == 1, "in the step:" + lines(operations));
                     }
                   }),
            "");
}

TEST(SimulatedNccl, NamesAKilledRankAtTheNextCall) {
  const auto ends = ranks(2, [](const auto& comm, at::Device device) {
    comm->barrier();
    if (comm->rank() == 1) raise(SIGKILL);
    auto values = at::ones({100}, at::TensorOptions().device(device));
    comm->all_reduce(values)->wait();  // the stream waits for ever
    for (;;) {
      std::this_thread::sleep_for(milliseconds(5));
      comm->all_reduce(values)->wait();
    }
  });
  EXPECT_EQ(ends[0].blamed, 1) << ends[0].error;
}

TEST(SimulatedNccl, NamesAKilledRankWhereTheHostWaits) {
  const auto ends = ranks(2, [](const auto& comm, at::Device) {
    comm->barrier();
    if (comm->rank() == 1) raise(SIGKILL);
    comm->barrier();
  });
  EXPECT_EQ(ends[0].blamed, 1) << ends[0].error;
}

// A value of an operation that failed is never read: the process ends with the error, if the host waits for the GPU and
// makes no call that could throw it.
TEST(SimulatedNccl, EndsAProcessWhoseHostWaitsForADeadPeersData) {
  testing::internal::CaptureStderr();
  const auto ends = ranks(
      2,
      [](const auto& comm, at::Device device) {
        comm->barrier();
        if (comm->rank() == 1) {
          std::this_thread::sleep_for(seconds(1));
          raise(SIGKILL);
        }
        simulated_nccl::be_patient(milliseconds(50));
        auto values = at::ones({100}, at::TensorOptions().device(device));
        comm->all_reduce(values)->wait();
        throw std::runtime_error("read " + std::to_string(values.sum().template item<float>()));
      },
      seconds(2));
  const auto said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(ends[0].exit_code, static_cast<int>(ExitCode::kPeer)) << ends[0].error;
  EXPECT_NE(said.find("libzero: rank 0 ends"), std::string::npos) << said;
  EXPECT_NE(said.find("rank 1"), std::string::npos) << said;
}

// A rank that does not call in time is named by the one that waits.
TEST(SimulatedNccl, NamesALateRankAfterTheTimeout) {
  const auto ends = ranks(
      2,
      [](const auto& comm, at::Device device) {
        comm->barrier();
        simulated_nccl::be_patient(milliseconds(50));
        if (comm->rank() == 1) std::this_thread::sleep_for(seconds(3));
        auto values = at::ones({100}, at::TensorOptions().device(device));
        const auto work = comm->all_reduce(values);
        for (;;) {
          work->wait();
          std::this_thread::sleep_for(milliseconds(5));
        }
      },
      milliseconds(1500));
  EXPECT_EQ(ends[0].blamed, 1) << ends[0].error;
  EXPECT_NE(ends[0].error.find("all_reduce(fp32, 100 elements)"), std::string::npos) << ends[0].error;
}

TEST(SimulatedNccl, AnErrorOfNcclIsAnErrorOfTheCall) {
  const auto ends = ranks(2, [](const auto& comm, at::Device device) {
    comm->barrier();
    auto values = at::ones({100}, at::TensorOptions().device(device));
    if (comm->rank() == 0) simulated_nccl::refuse_next(3);
    for (;;) {
      comm->all_reduce(values)->wait();
      std::this_thread::sleep_for(milliseconds(5));
    }
  });
  EXPECT_NE(ends[0].error.find("'internal error'"), std::string::npos) << ends[0].error;
  EXPECT_FALSE(ends[1].ok());
}

TEST(SimulatedNccl, AFailedGpuIsThisRanksFailure) {
  const auto ends = ranks(2, [](const auto& comm, at::Device device) {
    comm->barrier();
    auto values = at::ones({100}, at::TensorOptions().device(device));
    const auto work = comm->all_reduce(values);
    if (comm->rank() == 0) simulated_gpu::fail_queries();
    for (;;) {
      std::this_thread::sleep_for(milliseconds(5));
      comm->all_reduce(values);
    }
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.blamed, 0) << end.error;
    EXPECT_NE(end.error.find("illegal memory access"), std::string::npos) << end.error;
  }
}

// A program that was told of a failure continues as long as it likes, and no other group's stream waits for ever.
TEST(SimulatedNccl, AProgramThatCaughtTheFailureIsNotEnded) {
  const auto ends = ranks(
      2,
      [](const auto& comm, at::Device device) {
        const auto group = comm->split(0, comm->rank(), "other");
        comm->barrier();
        if (comm->rank() == 1) {
          std::this_thread::sleep_for(milliseconds(500));
          raise(SIGKILL);
        }
        simulated_nccl::be_patient(milliseconds(50));
        auto values = at::ones({100}, at::TensorOptions().device(device));
        group->all_reduce(values)->wait();
        bool told = false;
        try {
          comm->barrier();
        } catch (const CommError& error) {
          told = error.rank() == 1;
        }
        require(told, "the dead rank was not named");
        std::this_thread::sleep_for(seconds(3));  // twice the time that one may continue without being told
        (void)values.sum().template item<float>();
      },
      milliseconds(1500));
  EXPECT_TRUE(ends[0].ok()) << ends[0].error << " " << ends[0].exit_code;
}

// What was not waited for keeps its memory until it ends.
TEST(SimulatedNccl, AWorkThatIsDroppedKeepsItsTensors) {
  EXPECT_EQ(errors(2,
                   [](const auto& comm, at::Device device) {
                     for (int round = 0; round < 20; ++round) {
                       comm->all_reduce(at::ones({10000}, at::TensorOptions().device(device)));
                       const auto other = at::full({10000}, 7.0, at::TensorOptions().device(device));
                       require(other.sum().template item<float>() == 70000, "other values");
                     }
                     comm->barrier();
                   }),
            "");
}

}  // namespace zero::test::nccl_simulated_test
