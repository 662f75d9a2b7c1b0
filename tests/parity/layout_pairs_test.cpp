// Checkpoints between layouts of processes: ranks, tensor- and sequence-parallel degrees, expert degrees, stages.
// States are equal bit for bit, and training goes on as at the first layout.
#include <gtest/gtest.h>
#include <torch/serialize.h>
#include <zero/checkpoint_tools.h>
#include <zero/zero.h>

#include <cmath>
#include <set>
#include <sstream>

#include "parity/mesh_problems.h"
#include "parity/moe_problems.h"
#include "support/folder.h"
#include "support/require.h"

namespace zero::test::layout_pairs_test {
namespace {

using namespace zero::test::mesh;
using Comm = std::shared_ptr<Communicator>;

struct Layout {
  int world = 1, t = 1, u = 1, stage = 0;
  std::string text() const {
    std::ostringstream out;
    out << world << " ranks, t " << t << ", u " << u << ", stage " << stage;
    return out.str();
  }
};

// [collective] The states of all parameters, in one vector.
at::Tensor states_of(Engine& engine, const std::vector<std::string>& names) {
  std::vector<at::Tensor> all;
  for (const auto& name : names)
    for (const char* state : {"master", "exp_avg", "exp_avg_sq"})
      all.push_back(engine.parameter_state(name, state).reshape({-1}));
  return at::cat(all);
}

// The samples of a step are the same at every layout: `kSamples` over the data-parallel ranks and micro-batches.
constexpr int kSamples = 4;

Case case_of(const Layout& layout, const std::string& recipe) {
  return {.model = &gpt_model(),
          .t = layout.t,
          .u = layout.u,
          .stage = layout.stage,
          .accumulation = kSamples / (layout.world / layout.t / layout.u),
          .recipe = recipe};
}

// The mean losses of steps.
std::vector<double> train_on(Engine& engine, torch::nn::Module& module, const Case& c, int begin, int end) {
  const auto& mesh = engine.mesh();
  std::vector<double> losses;
  for (int step = begin; step < end; ++step) {
    double sum = 0;
    for (int micro = 0; micro < c.accumulation; ++micro) {
      sum += backward(engine, module, c, seed_of(step, 0, mesh.rank("dp") * c.accumulation + micro));
      engine.step();
    }
    auto mean = at::full({1}, sum / c.accumulation / mesh.size("dp"));
    mesh.group("dp")->all_reduce(mean)->wait();
    losses.push_back(mean.item<double>());
  }
  return losses;
}

// Trains three steps and saves; `steps` more are trained for their losses.
std::vector<double> save_at(const Layout& layout, const std::string& recipe, const std::string& folder, int steps) {
  const auto file = folder + "/expected.pt";
  expect_passed({"shm", layout.world}, [&](const Comm& comm) {
    const auto c = case_of(layout, recipe);
    const auto module = make_model(*c.model);
    Engine engine(module, c.options(), comm);
    train_on(engine, *module, c, 0, 3);
    engine.save_checkpoint(folder, "t");
    const auto states = states_of(engine, make_model(*c.model)->named_parameters().keys());
    const auto losses = train_on(engine, *module, c, 3, 3 + steps);
    if (comm->rank() == 0) torch::save(std::vector<at::Tensor>{states, at::tensor(losses, at::kDouble)}, file);
  });
  std::vector<at::Tensor> saved;
  torch::load(saved, file);
  return {saved[1].data_ptr<double>(), saved[1].data_ptr<double>() + saved[1].numel()};
}

TEST(LayoutPairs, StatesAndLosses) {
  // Bounds as measured: of one layout to another, sums of gradients are grouped otherwise.
  struct Chain {
    std::string recipe;
    double bound;
    Layout from;
    std::vector<Layout> to;
  };
  for (const auto& [recipe, bound, from, layouts] : std::vector<Chain>{
           {"fp32", 2e-5, {4, 1, 1, 2}, {{1, 1, 1, 0}, {2, 1, 1, 3}, {4, 2, 1, 1}, {2, 2, 1, 3}, {2, 1, 2, 1}}},
           {"fp32", 2e-5, {4, 2, 1, 3}, {{4, 4, 1, 0}, {1, 1, 1, 3}, {2, 1, 1, 2}, {4, 1, 1, 3}}},
           {"fp32", 2e-5, {4, 1, 2, 2}, {{2, 1, 2, 3}, {4, 2, 2, 1}}},
           {"bf16", 2e-2, {2, 2, 1, 1}, {{4, 1, 1, 3}, {1, 1, 1, 2}}}}) {
    const TempFolder folder;
    const auto expected = save_at(from, recipe, folder.text(), 20);
    ASSERT_EQ(expected.size(), 20U);
    for (const auto& layout : layouts)
      expect_passed({"shm", layout.world}, [&](const Comm& comm) {
        const auto label = recipe + ", " + from.text() + " to " + layout.text() + ": ";
        const auto c = case_of(layout, recipe);
        const auto module = make_model(*c.model);
        Engine engine(module, c.options(), comm);
        require(engine.load_checkpoint(folder.text()) == "t", label + "the tag");
        std::vector<at::Tensor> saved;
        torch::load(saved, folder.text() + "/expected.pt");
        require(states_of(engine, make_model(*c.model)->named_parameters().keys()).equal(saved[0]), label + "states");
        engine.save_checkpoint(folder.text() + "/again", "t");
        if (comm->rank() == 0)
          require(checkpoint_digest(folder.text() + "/again") == checkpoint_digest(folder.text(), "t"),
                  label + "the digest");
        if (layout.u != from.u) return;  // divided sequences have another length (mesh_problems.h)
        const auto losses = train_on(engine, *module, c, 3, 23);
        for (std::size_t k = 0; k < losses.size(); ++k)
          require(std::abs(losses[k] - expected[k]) <= bound * std::abs(expected[k]),
                  label + "loss " + std::to_string(losses[k]) + ", expected " + std::to_string(expected[k]));
      });
  }
}

// Experts over other numbers of ranks.
TEST(LayoutPairs, Experts) {
  using namespace zero::test::moe;
  const TempFolder folder;
  const auto names = make_net(options_of(1, 1))->named_parameters().keys();
  expect_passed({"shm", 4}, [&](const Comm& comm) {
    const auto net = make_net(options_of(2, 1));
    Engine engine(net, engine_options(3), comm);
    for (int step = 0; step < 3; ++step) {
      engine.backward(moe::loss_of(*net, step, comm->rank()));
      engine.step();
    }
    engine.save_checkpoint(folder.text(), "t");
    const auto states = states_of(engine, names);
    if (comm->rank() == 0) torch::save(std::vector<at::Tensor>{states}, folder.text() + "/expected.pt");
  });
  for (const auto& [world, ep, stage] :
       std::vector<std::tuple<int, int, int>>{{1, 1, 0}, {2, 2, 3}, {2, 1, 1}, {4, 4, 2}})
    expect_passed({"shm", world}, [&, ep = ep, stage = stage](const Comm& comm) {
      const auto net = make_net(options_of(ep, 1));
      Engine engine(net, engine_options(stage), comm);
      engine.load_checkpoint(folder.text());
      std::vector<at::Tensor> saved;
      torch::load(saved, folder.text() + "/expected.pt");
      require(states_of(engine, names).equal(saved[0]),
              std::to_string(comm->size()) + " ranks, ep " + std::to_string(ep) + ": other states");
    });
}

// Other ranks draw numbers that no rank drew before, the same after every load.
TEST(LayoutPairs, RandomNumbers) {
  const TempFolder folder;
  const auto open = [](const Comm& comm, const std::function<void(Engine&)>& use) {
    const Case c{.model = &gpt_model(), .t = 1};
    const auto module = make_model(*c.model);
    Engine engine(module, c.options(), comm);
    use(engine);
  };
  expect_passed({"shm", 2}, [&](const Comm& comm) {
    open(comm, [&](Engine& engine) {
      torch::manual_seed(static_cast<std::uint64_t>(5 + comm->rank()));
      engine.save_checkpoint(folder.text(), "t");
    });
  });
  for (const int world : {1, 3})
    expect_passed({"shm", world}, [&](const Comm& comm) {
      open(comm, [&](Engine& engine) {
        std::set<float> drawn;
        const auto draw = [&] {
          engine.load_checkpoint(folder.text());
          return at::rand({1}).item<float>();
        };
        const auto own = draw();
        torch::manual_seed(99);
        require(draw() == own, "another number after the same load");
        for (const int seed : {5, 6}) {
          torch::manual_seed(static_cast<std::uint64_t>(seed));
          drawn.insert(at::rand({1}).item<float>());
        }
        for (const auto& number : comm->all_gather_bytes(std::to_string(own))) drawn.insert(std::stof(number));
        require(drawn.size() == 2U + static_cast<std::size_t>(comm->size()), "a number is drawn twice");
      });
    });
}

}  // namespace
}  // namespace zero::test::layout_pairs_test
