// Any number of ranks loads the checkpoint of any other, at any stage, bit for bit: tied, frozen, uneven, small and
// empty parameters, masters and moments. ZERO_WORLD_PAIRS=all takes all 25 pairs at all 16 pairs of stages.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <zero/checkpoint_tools.h>

#include "parity/training.h"
#include "support/folder.h"
#include "support/on_ranks.h"

namespace zero::test::world_pairs_test {
namespace {
namespace fs = std::filesystem;

// What parallel modes and numbers of ranks do not usually have: no dimension, no element, one element, frozen ones.
struct Odd : torch::nn::Module {
  torch::nn::Linear first{nullptr}, last{nullptr};
  at::Tensor scale, none, one, fixed;
  Odd() {
    first = register_module("first", torch::nn::Linear(7, 13));
    last = register_module("last", torch::nn::Linear(13, 3));
    scale = register_parameter("scale", at::ones({}));
    none = register_parameter("none", at::empty({0, 4}));
    one = register_parameter("one", at::ones({1}));
    fixed = register_parameter("fixed", at::ones({11}), /*requires_grad=*/false);
    register_buffer("count", at::zeros({3}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    return last(at::tanh(first(x)) * scale) * one + fixed.sum() * 0.01 + none.sum();
  }
};

const Problem kOdd{"odd", [] { return std::make_shared<Odd>(); },
                   [](torch::nn::Module& module, const at::Generator& g, at::ScalarType dtype) {
                     const auto x = at::randn({4, 7}, g, at::TensorOptions().dtype(at::kFloat)).to(dtype);
                     return dynamic_cast<Odd&>(module).forward(x).to(at::kFloat).pow(2).mean();
                   }};

struct Place {
  const Problem& task;
  std::string recipe;
  int world, stage;
};

// All states of all parameters, by name. [collective]
std::map<std::string, at::Tensor> states_of(Engine& engine, const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> all;
  for (const auto& item : module.named_parameters()) {
    all[item.key()] = engine.parameter_state(item.key()).clone();
    if (!item.value().requires_grad()) continue;
    for (const char* state : {"exp_avg", "exp_avg_sq"})
      all[item.key() + " " + state] = engine.parameter_state(item.key(), state).clone();
  }
  return all;
}

// Loads `from`, if any, trains `steps`, saves to `to`; returns rank 0's states.
std::map<std::string, at::Tensor> visit(const Place& place, const fs::path& from, int steps, const fs::path& to) {
  Training setup;
  setup.recipe = place.recipe;
  setup.stage = place.stage;
  std::map<std::string, at::Tensor> states;
  on_ranks(place.world, [&](const auto& comm) {
    auto module = make_module(place.task);
    Engine engine(module, Options::from_json(json_of(setup)), comm);
    if (!from.empty()) engine.load_checkpoint(from);
    for (int step = 0; step < steps; ++step) {
      engine.backward(loss_of(place.task, *module, comm->rank(), step, dtype_of(setup)));
      engine.step();
    }
    engine.save_checkpoint(to, "t");
    auto mine = states_of(engine, *module);
    if (comm->rank() == 0) states = std::move(mine);
  });
  return states;
}

TEST(WorldPairs, AnyNumberOfRanksLoadsTheCheckpointOfAnyOther) {
  constexpr std::array<int, 5> kWorlds{1, 2, 3, 4, 8};
  const bool all = std::getenv("ZERO_WORLD_PAIRS") != nullptr;
  int pairs = 0;
  for (const auto* task : {&problem("gpt"), &problem("frozen"), &kOdd}) {
    int number = 0;
    for (const int from : kWorlds)
      for (int stage = 0; stage < 4; ++stage) {
        // One of the others for each, else: every pair of numbers once in three models.
        if (!all && stage != from % 4) continue;
        const TempFolder folder(TempFolder::On::Memory);
        const std::string recipe = (number + stage) % 2 ? "bf16" : "fp32";
        const auto saved = visit({*task, recipe, from, stage}, {}, 2, folder.path() / "a");
        const auto digest = checkpoint_digest((folder.path() / "a").string(), "t");
        for (std::size_t w = 0; w < kWorlds.size(); ++w)
          for (int other = 0; other < 4; ++other) {
            if (!all && (other != (from + static_cast<int>(w)) % 4 || (w + static_cast<std::size_t>(from)) % 3 == 0))
              continue;
            const Place to{*task, recipe, kWorlds[w], other};
            SCOPED_TRACE(task->name + ": " + std::to_string(from) + " ranks, stage " + std::to_string(stage) + " to " +
                         std::to_string(to.world) + ", stage " + std::to_string(other));
            const auto again = folder.path() / ("b" + std::to_string(number++));
            EXPECT_TRUE(equal_bits(visit(to, folder.path() / "a", 0, again), saved));
            EXPECT_EQ(checkpoint_digest(again.string(), "t"), digest);
            ++pairs;
          }
      }
  }
  std::cout << pairs << " pairs of layouts, bit for bit\n";
}

TEST(WorldPairs, AChain) {
  const TempFolder folder(TempFolder::On::Memory);
  auto saved = visit({kOdd, "fp32", 4, 2}, {}, 3, folder.path() / "0");
  int number = 0;
  for (const auto& [world, stage] : {std::pair(2, 3), std::pair(8, 0), std::pair(4, 1)}) {
    const auto from = folder.path() / std::to_string(number++), to = folder.path() / std::to_string(number);
    EXPECT_TRUE(equal_bits(visit({kOdd, "fp32", world, stage}, from, 0, to), saved)) << world;
  }
}

}  // namespace
}  // namespace zero::test::world_pairs_test
