// Ranks of one host that end early: the data that their peers use remains unchanged, or the peers get an error.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <chrono>
#include <optional>
#include <thread>

#include <zero/library.h>

#include "comm/group.h"
#include "comm/symmetric_buffer.h"
#include "soundness/shm_memory.h"
#include "support/shm_ranks.h"

namespace zero::test::departure_test {
namespace {

using namespace std::chrono_literals;

torch::nn::Sequential four_layers(std::int64_t width) {
  torch::nn::Sequential model;
  for (int i = 0; i < 4; ++i) model->push_back(torch::nn::Linear(width, width));
  return model;
}

const char* const kStage3 =
    R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
                               "zero_optimization": {"stage": 3}})";

void require_no_more_pages_than(long long early) {
  const auto grown = shared_pages_bytes() - early;
  require(grown < (6 << 20), "shared pages grew by " + std::to_string(grown) + " bytes");
}

// More than the free memory that the arena keeps resident.
constexpr std::int64_t kNumel = 4 << 20;

TEST(Departure, LeavesAGatheredVectorAsItIs) {
  const auto ends = with_ranks(2, [](const Comm& comm) {
    auto vector = comm::group_of(*comm)->share(kNumel, at::kFloat);
    vector->shard().fill_(comm->rank() + 1.0);
    vector->publish();
    comm::group_of(*comm)->gather(*vector);
    comm->barrier();
    if (comm->rank() == 1) return;
    std::this_thread::sleep_for(300ms);
    require(vector->whole().narrow(0, 0, kNumel).eq(1).all().item<bool>(), "the own shard");
    require(vector->whole().narrow(0, kNumel, kNumel).eq(2).all().item<bool>(), "the shard of the rank that left");
  });
  EXPECT_EQ(errors_of(ends), "");
}

// The rank that freed the vector continues and allocates memory of the same size.
TEST(Departure, LeavesItWhileItsRankTakesOtherMemory) {
  const auto ends = with_ranks(2, [](const Comm& comm) {
    auto vector = comm::group_of(*comm)->share(kNumel, at::kFloat);
    vector->shard().fill_(comm->rank() + 1.0);
    vector->publish();
    comm::group_of(*comm)->gather(*vector);
    comm->barrier();
    if (comm->rank() == 1) {
      vector.reset();
      for (int i = 0; i < 3; ++i) comm->allocate(kNumel, at::kFloat).fill_(-5);
    }
    comm->barrier();
    if (comm->rank() == 0)
      require(vector->whole().narrow(0, kNumel, kNumel).eq(2).all().item<bool>(), "the shard that was given up");
    comm->barrier();
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(Departure, GivesPagesBackOnceNobodyReadsThem) {
  const auto ends = with_ranks(3, [](const Comm& comm) {
    long long early = 0;
    for (int round = 0; round < 40; ++round) {
      auto vector = comm::group_of(*comm)->share(kNumel / 8, at::kFloat);
      vector->shard().fill_(round);
      vector->publish();
      comm::group_of(*comm)->gather(*vector);
      require(vector->whole().eq(round).all().item<bool>(), "round " + std::to_string(round));
      if (comm->rank() == round % 3) std::this_thread::sleep_for(5ms);  // another one is the last to leave
      vector.reset();
      if (round == 4) early = shared_pages_bytes();
    }
    comm->barrier();
    require_no_more_pages_than(early);
  });
  EXPECT_EQ(errors_of(ends), "");
}

// Its counters restart at the same locations.
TEST(Departure, OfAnEarlierVectorSaysNothingOfALaterOne) {
  const auto ends = with_ranks(2, [](const Comm& comm) {
    for (int round = 0; round < 3; ++round) {
      auto vector = comm::group_of(*comm)->share(10000, at::kFloat);
      for (int step = 0; step <= round; ++step) {
        vector->shard().fill_(10 * round + step + comm->rank());
        if (comm->rank() == step % 2) std::this_thread::sleep_for(20ms);
        vector->publish();
        comm::group_of(*comm)->gather(*vector);
        require(vector->whole()[19999].item<float>() == static_cast<float>(10 * round + step + 1), "too early");
        comm->barrier();
      }
    }
  });
  EXPECT_EQ(errors_of(ends), "");
}

// All ranks evaluate at different speeds and end; no rank has to wait for the slowest.
TEST(Departure, OfAFasterRankLeavesTheSlowerOneItsEvaluation) {
  const auto ends = with_ranks(3, [](const Comm& comm) {
    auto model = four_layers(256);
    Engine engine(model.ptr(), Options::from_json(kStage3), comm);
    auto x = at::ones({2, 256});
    engine.backward(model->forward(x).pow(2).mean());
    engine.step();
    const auto expected = engine.full_state_dict();
    at::NoGradGuard no_grad;
    auto y = x;
    for (int layer = 0; layer < 4; ++layer) {
      if (comm->rank() == 0) std::this_thread::sleep_for(150ms);
      x = model[layer]->as<torch::nn::Linear>()->forward(x);
      if (comm->rank() != 0) continue;  // which have no weights to compare with
      const auto name = std::to_string(layer);
      y = at::linear(y, expected.at(name + ".weight"), expected.at(name + ".bias"));
    }
    require(comm->rank() != 0 || x.equal(y), "another result than that of the weights");
  });
  EXPECT_EQ(errors_of(ends), "");
}

// Ranks train, then rank 0 evaluates alone.
TEST(Departure, OfAnEngineChangesNoEvaluation) {
  const auto ends = with_ranks(2, [](const Comm& comm) {
    auto model = four_layers(512);
    std::optional<Engine> engine(std::in_place, model.ptr(), Options::from_json(kStage3), comm);
    const auto x = at::ones({2, 512});
    for (int step = 0; step < 3; ++step) {
      engine->backward(model->forward(x * (comm->rank() + step + 1)).pow(2).mean());
      engine->step();
    }
    at::NoGradGuard no_grad;
    const auto before = comm->rank() == 0 ? model->forward(x) : at::Tensor();
    comm->barrier();
    if (comm->rank() == 1) return;
    std::this_thread::sleep_for(500ms);
    for (int again = 0; again < 3; ++again)
      require(model->forward(x).equal(before), "another result after the peer had left");
  });
  EXPECT_EQ(errors_of(ends), "");
}

TEST(Departure, OfAHundredEnginesLeavesNoPages) {
  const auto ends = with_ranks(2, [](const Comm& comm) {
    const auto x = at::ones({2, 256});
    long long early = 0;
    for (int round = 0; round < 100; ++round) {
      auto model = four_layers(256);
      Engine engine(model.ptr(), Options::from_json(kStage3), comm);
      engine.backward(model->forward(x).pow(2).mean());
      engine.step();
      if (round == 9) early = shared_pages_bytes();
    }
    comm->barrier();
    require_no_more_pages_than(early);
  });
  EXPECT_EQ(errors_of(ends), "");
}

// The current timeout applies, not the one at the creation of the vector.
TEST(Timeout, SetLaterReachesWaitsOfVectorsMadeBefore) {
  const auto ends = with_ranks(2, [](const Comm& comm) {
    const auto vector = comm::group_of(*comm)->share(10000, at::kFloat);
    comm->set_timeout(300ms);
    if (comm->rank() == 1) return std::this_thread::sleep_for(1500ms);
    vector->publish();
    try {
      comm::group_of(*comm)->gather(*vector);
    } catch (const CommError& error) {
      return require(error.rank() == 1 && contains(error.what(), "300 ms"), error.what());
    }
    throw std::runtime_error("no error");
  });
  EXPECT_EQ(errors_of(ends), "");
}

}  // namespace
}  // namespace zero::test::departure_test
