// Bytes are exact: the bytes stored on a rank, unsharded at the peak, and sent in a step follow the formulas of
// docs/memory.md for every stage, recipe and accumulation.
#include <gtest/gtest.h>

#include <mutex>

#include "parity/training.h"
#include "support/nightly.h"

namespace zero::test::memory_test {
namespace {

using Tier = MemoryReport::Tier;
using Purpose = MemoryReport::Purpose;

// Every size a multiple of 128 elements, so that no padding hides an error (worlds 1, 2, 4).
constexpr const char* kModel = "padded_free_gpt";

std::int64_t count_parameters(const Engine& engine) {
  std::int64_t sum = 0;
  for (const auto& [name, numel] : engine.units()) sum += numel;
  return sum;
}

struct Resting {
  int world, accumulation;
  const char* recipe;
  const char* optimizer;
};

class RestingBytes : public ::testing::TestWithParam<Resting> {};

TEST_P(RestingBytes, FollowTheFormula) {
  const auto c = GetParam();
  const bool mixed = std::string(c.recipe) != "fp32", adam = std::string(c.optimizer).find("Adam") != std::string::npos;
  for (int stage = 0; stage <= 3; ++stage) {
    Training setup;
    setup.problem = kModel;
    setup.world = c.world;
    setup.stage = stage;
    setup.recipe = c.recipe;
    setup.accumulation = c.accumulation;
    setup.optimizer = c.optimizer;
    run_ranks(c.world, [&](std::shared_ptr<Communicator> comm) {
      at::set_num_threads(1);
      const auto& task = problem(kModel);
      auto module = make_module(task);
      Engine engine(module, Options::from_json(json_of(setup)), comm);
      for (int k = 0; k < 2 * c.accumulation; ++k) {
        engine.backward(loss_of(task, *module, comm->rank(), k, dtype_of(setup)));
        engine.step();
      }
      const std::uint64_t P = static_cast<std::uint64_t>(count_parameters(engine)),
                          N = static_cast<std::uint64_t>(c.world);
      const std::uint64_t p = mixed ? 2 : 4, g = c.accumulation > 1 ? 4 : p;
      const auto memory = engine.memory();
      const auto device = [&](Purpose purpose) { return memory.current(Tier::Device, purpose); };
      EXPECT_EQ(device(Purpose::Parameters), p * P / (stage >= 3 ? N : 1)) << "stage " << stage;
      if (N > 1) {
        EXPECT_EQ(device(Purpose::Gradients), g * P / (stage >= 2 ? N : 1)) << "stage " << stage;
      }
      EXPECT_EQ(device(Purpose::MasterParameters), mixed ? 4 * P / (stage >= 1 ? N : 1) : 0) << "stage " << stage;
      EXPECT_EQ(device(Purpose::OptimizerStates), (adam ? 8 : 4) * P / (stage >= 1 ? N : 1)) << "stage " << stage;
      EXPECT_EQ(device(Purpose::Activations), 0u) << "nothing of the pass is left";
      EXPECT_EQ(memory.current(Tier::Host), 0u);
      EXPECT_EQ(memory.current(Tier::File), 0u);
    });
  }
}

constexpr const char* kAdam = R"({"type": "AdamW", "params": {"lr": 0.01}})";
constexpr const char* kMomentum = R"({"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}})";
INSTANTIATE_TEST_SUITE_P(Recipes, RestingBytes,
                         ::testing::Values(Resting{1, 1, "fp32", kAdam}, Resting{1, 1, "bf16", kAdam},
                                           Resting{2, 1, "fp32", kAdam}, Resting{2, 1, "bf16", kAdam},
                                           Resting{2, 1, "fp16", kAdam}, Resting{2, 3, "bf16", kAdam},
                                           Resting{4, 1, "bf16", kAdam}, Resting{4, 1, "fp32", kMomentum},
                                           Resting{4, 2, "fp16", kMomentum}));

TEST(PeakBytes, AtMostTwoUnitsAndTheRoot) {
  for (const bool prefetch : {true, false}) {
    Training setup;
    setup.problem = kModel;
    setup.recipe = "bf16";
    setup.prefetch = prefetch;
    run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      at::set_num_threads(1);
      const auto& task = problem(kModel);
      auto module = make_module(task);
      Engine engine(module, Options::from_json(json_of(setup)), comm);
      std::uint64_t root = 0, largest = 0;
      for (const auto& [name, numel] : engine.units()) {
        if (name == "root")
          root = 2 * static_cast<std::uint64_t>(numel);
        else
          largest = std::max(largest, 2 * static_cast<std::uint64_t>(numel));
      }
      ASSERT_GT(largest, 0u);
      for (int k = 0; k < 3; ++k) {
        engine.backward(loss_of(task, *module, comm->rank(), k, at::kBFloat16));
        engine.step();
      }
      const auto peak = engine.memory().peak(Tier::Device, Purpose::GatherBuffers);
      EXPECT_LE(peak, root + (prefetch ? 2 : 1) * largest);
      EXPECT_GE(peak, root + largest);
    });
  }
}

TEST(PeakBytes, ResetStartsAgain) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    const auto& task = problem("gpt");
    auto module = make_module(task);
    Training setup;
    Engine engine(module, Options::from_json(json_of(setup)), comm);
    engine.backward(loss_of(task, *module, 0, 0, at::kFloat));
    engine.step();
    EXPECT_GT(engine.memory().peak(Tier::Device, Purpose::Activations), 0u);
    engine.reset_peak_memory();
    EXPECT_EQ(engine.memory().peak(Tier::Device, Purpose::Activations), 0u);
    EXPECT_EQ(engine.memory().peak(Tier::Device), engine.memory().current(Tier::Device));
  });
}

TEST(Traffic, BytesSentFollowTheFormulas) {
  OneIn part(5);
  for (const char* recipe : {"fp32", "bf16"}) {
    for (const int world : {1, 2, 4}) {
      for (const int k : {1, 3}) {
        for (int stage = 0; stage <= 3; ++stage) {
          if (!part.take()) continue;
          Training setup;
          setup.problem = kModel;
          setup.recipe = recipe;
          setup.world = world;
          setup.accumulation = k;
          setup.stage = stage;
          setup.steps = 3;
          const auto run = train_threads(setup);
          std::uint64_t numel = 0;
          for (const auto& [name, value] : run.masters) numel += static_cast<std::uint64_t>(value.numel());
          const std::uint64_t S = (std::string(recipe) == "fp32" ? 4 : 2) * numel,
                              N = static_cast<std::uint64_t>(world), K = static_cast<std::uint64_t>(k);
          // In units of S: reductions and gathers of one optimizer step (p = r).
          const std::uint64_t volume = stage <= 1 ? 2 : stage == 2 ? K + 1 : 3 * K;
          for (const auto& stats : run.stats)
            EXPECT_EQ(stats.bytes_sent(), volume * S * (N - 1) / N)
                << recipe << " world " << world << " accumulation " << k << " stage " << stage;
        }
      }
    }
  }
}

}  // namespace
}  // namespace zero::test::memory_test
