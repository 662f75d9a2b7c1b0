// The shared-memory transport between threads: the same code as between processes, visible to sanitizers.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <chrono>
#include <thread>

#include "comm/group.h"
#include "comm/symmetric_buffer.h"
#include "comm/tensor_segments.h"
#include "parity/training.h"
#include "support/shm_threads.h"

namespace zero::test::shm_threads_test {
namespace {

using namespace std::chrono_literals;

class ShmThreads : public ::testing::TestWithParam<int> {};

TEST_P(ShmThreads, KeepTheContract) {
  with_shm_threads(GetParam(), [](const Comm& comm) {
    ASSERT_EQ(comm->transport(), "shm");
    check_all(comm);
    check_random_program(comm, 7, 100);
  });
}

// Read and written here, not in libtorch, which is not instrumented.
TEST_P(ShmThreads, ReadSymmetricBuffersInPlace) {
  const int size = GetParam();
  with_shm_threads(size, [size](const Comm& comm) {
    for (const std::int64_t numel : {1024, 1500, 100003}) {
      const auto vector = comm::group_of(*comm)->share(numel, at::kFloat);
      auto* const shard = vector->shard().data_ptr<float>();
      const auto* const whole = vector->whole().const_data_ptr<float>();
      for (int step = 0; step < 5; ++step) {
        comm->barrier();  // no rank reads any more
        for (std::int64_t i = 0; i < numel; ++i) shard[i] = static_cast<float>(i % 97 + 7 * comm->rank() + step);
        vector->publish();
        comm::group_of(*comm)->gather(*vector);
        for (std::int64_t i = 0; i < size * numel; ++i)
          require(whole[i] == static_cast<float>(i % numel % 97 + 7 * (i / numel) + step),
                  "step " + std::to_string(step));
      }
      comm->barrier();
    }
  });
}

TEST_P(ShmThreads, ReduceWhatLiesInStretches) {
  const int size = GetParam();
  with_shm_threads(size, [size](const Comm& comm) {
    const std::vector<std::int64_t> numels{3, 70001, 1, 20000};
    const std::int64_t shard = (90005 + size - 1) / size;
    const auto value = [](int rank, std::int64_t i) { return static_cast<float>((i * 7 + rank * 13) % 101); };
    for (const bool to_all : {false, true}) {
      comm::PeerReduce sum;
      sum.shard_numel = shard;
      sum.to_all = to_all;
      std::int64_t at = 0;
      for (const auto numel : numels) {
        const auto data = comm->allocate(numel, at::kFloat);
        for (std::int64_t i = 0; i < numel; ++i) data.data_ptr<float>()[i] = value(comm->rank(), at + i);
        sum.vector.push_back({at, data});
        at += numel;
      }
      const auto stretches = sum.vector;
      comm::group_of(*comm)->peer_reduce_scatter(std::move(sum))->wait();
      for (const auto& stretch : stretches) {
        for (std::int64_t i = 0; i < stretch.data.numel(); ++i) {
          const auto place = stretch.begin + i;
          if (!to_all && place / shard != comm->rank()) continue;
          float expected = 0;
          for (int rank = 0; rank < size; ++rank) expected += value(rank, place);
          require(stretch.data.const_data_ptr<float>()[i] == expected, "element " + std::to_string(place));
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmThreads, ::testing::Values(1, 2, 3));

TEST(ShmThreadsFailure, IsToldToTheOthers) {
  with_shm_threads(3, [](const Comm& comm) { check_abort(comm, 1); });
  with_shm_threads(2, [](const Comm& comm) { check_timeout(comm, 1, 300ms); });
}

// Engines whose gradients and parameters are read in place have the bits of the thread transport's, which copies.
TEST(ShmThreadsEngine, HasTheBitsOfOtherTransports) {
  for (const char* recipe : {"fp32", "bf16"}) {
    for (const int accumulation : {1, 2}) {
      for (int stage = 0; stage <= 3; ++stage) {
        Training training;
        training.problem = "padded_free_gpt";
        training.steps = 4;
        training.clip = 0.1;
        training.recipe = recipe;
        training.accumulation = accumulation;
        training.stage = stage;
        const auto expected = train_threads(training).hash;
        with_shm_threads(training.world, [&](const Comm& comm) {
          const auto got = train_rank(training, comm).hash;
          require(got == expected,
                  std::string(recipe) + " stage " + std::to_string(stage) + ": " + got + ", expected " + expected);
        });
      }
    }
  }
}

}  // namespace
}  // namespace zero::test::shm_threads_test
