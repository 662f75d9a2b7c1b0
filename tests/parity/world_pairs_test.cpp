// Any number of ranks loads the checkpoint of any other, at any stage and tier, bit for bit: tied, frozen, uneven,
// small and empty parameters, masters and moments. ZERO_WORLD_PAIRS=all takes all 25 pairs of numbers at all 121 pairs
// of stages and tiers.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
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

// Where states rest: with the ranks' memory (none), in host memory (cpu), in files (nvme), in files as the parameters
// do (all).
struct Rest {
  int stage;
  std::string tier;
  std::string text() const { return "stage " + std::to_string(stage) + ", tier " + tier; }
};

const std::vector<Rest> kRests{{0, "none"}, {1, "none"}, {1, "cpu"}, {1, "nvme"}, {2, "none"}, {2, "cpu"},
                               {2, "nvme"}, {3, "none"}, {3, "cpu"}, {3, "nvme"}, {3, "all"}};

struct Place {
  const Problem& task;
  std::string recipe;
  int world;
  const Rest& rest;
};

// Further keys of zero_optimization.
std::string tier_keys(const std::string& tier, const fs::path& files) {
  if (tier == "none") return "";
  const auto device = [&](const std::string& what, const std::string& name) {
    return ", \"offload_" + what + R"(": {"device": ")" + name + R"(", "nvme_path": ")" + files.string() + "\"}";
  };
  if (tier == "all") return device("optimizer", "nvme") + device("param", "nvme");
  return device("optimizer", tier);
}

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
  setup.stage = place.rest.stage;
  const TempFolder files;
  setup.zero = tier_keys(place.rest.tier, files.path());
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
  std::set<std::pair<std::string, std::string>> tiers;
  std::size_t saves = 0, pairs = 0;
  for (const auto* task : {&problem("gpt"), &problem("frozen"), &kOdd})
    for (const int world : kWorlds)
      for (std::size_t r = 0; r < kRests.size(); ++r) {
        // One of them for each number of ranks; steps of 3 and 5 meet all 11, and all pairs of tiers.
        const auto turn = kRests.size();
        if (!all && r != saves * 3 % turn) continue;
        const TempFolder folder(TempFolder::On::Memory);
        const std::string recipe = saves++ % 2 ? "bf16" : "fp32";
        const Place from{*task, recipe, world, kRests[r]};
        const auto saved = visit(from, {}, 2, folder.path() / "a");
        const auto digest = checkpoint_digest((folder.path() / "a").string(), "t");
        for (const int other : kWorlds)
          for (std::size_t s = 0; s < kRests.size(); ++s) {
            if (!all && s != pairs * 5 % turn) continue;
            const Place to{*task, recipe, other, kRests[s]};
            SCOPED_TRACE(task->name + ": " + std::to_string(world) + " ranks, " + from.rest.text() + " to " +
                         std::to_string(other) + ", " + to.rest.text());
            const auto again = folder.path() / ("b" + std::to_string(pairs++));
            EXPECT_TRUE(equal_bits(visit(to, folder.path() / "a", 0, again), saved));
            EXPECT_EQ(checkpoint_digest(again.string(), "t"), digest);
            fs::remove_all(again);
            tiers.emplace(from.rest.tier, to.rest.tier);
            if (!all) break;
          }
        if (!all) break;
      }
  EXPECT_EQ(tiers.size(), 16u);
  std::cout << pairs << " pairs of layouts, bit for bit\n";
}

TEST(WorldPairs, AChain) {
  const TempFolder folder(TempFolder::On::Memory);
  auto saved = visit({kOdd, "fp32", 4, kRests[5]}, {}, 3, folder.path() / "0");
  int number = 0;
  for (const auto& [world, rest] : {std::pair(2, kRests[10]), std::pair(8, kRests[0]), std::pair(4, kRests[3])}) {
    const auto from = folder.path() / std::to_string(number++), to = folder.path() / std::to_string(number);
    EXPECT_TRUE(equal_bits(visit({kOdd, "fp32", world, rest}, from, 0, to), saved))
        << world << " ranks, " << rest.text();
  }
}

}  // namespace
}  // namespace zero::test::world_pairs_test
