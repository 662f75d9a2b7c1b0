// Checkpoints between layouts of processes: ranks, tensor- and sequence-parallel degrees, expert degrees, stages.
// States are equal bit for bit, and training continues as at the first layout.
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <zero/checkpoint_tools.h>
#include <zero/library.h>

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <map>
#include <set>
#include <sstream>

#include "models/gpt.h"
#include "parity/mesh_problems.h"
#include "parity/moe_problems.h"
#include "support/folder.h"
#include "support/nightly.h"
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

// Losses of rank 0 for the process that started the ranks.
void write_losses(const std::vector<double>& losses, const std::string& file) {
  torch::save(std::vector<at::Tensor>{at::tensor(losses, at::kDouble)}, file);
}
std::vector<double> read_losses(const std::string& file) {
  std::vector<at::Tensor> all;
  torch::load(all, file);
  return {all[0].data_ptr<double>(), all[0].data_ptr<double>() + all[0].numel()};
}

// The largest relative difference of losses between two layouts, by what differs and recipe.
class Differences {
 public:
  void add(const std::string& what, const std::vector<double>& losses, const std::vector<double>& expected) {
    EXPECT_EQ(losses.size(), 20U);
    auto& most = most_[what];
    most = std::max(most, apart(losses, expected));
  }
  // As measured (docs/checkpoints.md), with room: sums of gradients are grouped otherwise.
  void check() const {
    for (const auto& [what, most] : most_) {
      std::cout << "largest relative difference of 20 losses, " << what << ": " << std::setprecision(2) << most << "\n";
      EXPECT_LE(most, what.ends_with("fp32") ? 1e-6 : 1e-2) << what;
    }
  }

 private:
  std::map<std::string, double> most_;
};

std::string difference_of(const Layout& from, const Layout& to, const std::string& recipe) {
  const char* what = from.t != to.t && from.u != to.u ? "tensor- and sequence-parallel degree"
                     : from.t != to.t                 ? "tensor-parallel degree"
                     : from.u != to.u                 ? "sequence-parallel degree"
                                                      : "number of ranks";
  return std::string(what) + ", " + recipe;
}

void divide(torch::nn::Module& module, const Engine& engine, const Case& c) {
  if (c.u > 1) divide_sequence(dynamic_cast<::models::GptImpl&>(module), engine.mesh(), kTokens);
}

// Trains three steps and saves; trains 20 more for their losses.
std::vector<double> save_at(const Layout& layout, const std::string& recipe, const std::string& folder) {
  expect_passed({"shm", layout.world}, [&](const Comm& comm) {
    const auto c = case_of(layout, recipe);
    const auto module = make_model(*c.model);
    Engine engine(module, c.options(), comm);
    divide(*module, engine, c);
    train_on(engine, *module, c, 0, 3);
    engine.save_checkpoint(folder, "t");
    const auto states = states_of(engine, make_model(*c.model)->named_parameters().keys());
    const auto losses = train_on(engine, *module, c, 3, 23);
    if (comm->rank() != 0) return;
    torch::save(std::vector<at::Tensor>{states}, folder + "/expected.pt");
    write_losses(losses, folder + "/losses.pt");
  });
  return read_losses(folder + "/losses.pt");
}

TEST(LayoutPairs, StatesAndLosses) {
  struct Chain {
    std::string recipe;
    Layout from;
    std::vector<Layout> to;
  };
  Differences differences;
  OneIn part(7);
  for (auto& [recipe, from, layouts] : std::vector<Chain>{
           {"fp32", {4, 1, 1, 2}, {{1, 1, 1, 0}, {2, 1, 1, 3}, {4, 2, 1, 1}, {2, 2, 1, 3}, {2, 1, 2, 1}}},
           {"fp32", {4, 2, 1, 3}, {{4, 4, 1, 0}, {1, 1, 1, 3}, {2, 1, 1, 2}, {4, 1, 1, 3}}},
           {"fp32", {4, 1, 2, 2}, {{2, 1, 2, 3}, {4, 2, 2, 1}, {4, 1, 4, 3}, {1, 1, 1, 0}}},
           {"bf16", {2, 2, 1, 1}, {{4, 1, 1, 3}, {1, 1, 1, 2}}},
           {"bf16", {4, 1, 1, 2}, {{1, 1, 1, 0}, {2, 1, 1, 3}, {4, 2, 1, 1}, {2, 1, 2, 1}}}}) {
    std::erase_if(layouts, [&](const Layout&) { return !part.take(); });
    if (layouts.empty()) continue;
    const TempFolder folder(TempFolder::On::Memory);
    const auto expected = save_at(from, recipe, folder.text());
    for (const auto& layout : layouts) {
      const auto label = recipe + ", " + from.text() + " to " + layout.text() + ": ";
      expect_passed({"shm", layout.world}, [&](const Comm& comm) {
        const auto c = case_of(layout, recipe);
        const auto module = make_model(*c.model);
        Engine engine(module, c.options(), comm);
        divide(*module, engine, c);
        require(engine.load_checkpoint(folder.text()) == "t", label + "the tag");
        std::vector<at::Tensor> saved;
        torch::load(saved, folder.text() + "/expected.pt");
        require(states_of(engine, make_model(*c.model)->named_parameters().keys()).equal(saved[0]), label + "states");
        engine.save_checkpoint(folder.text() + "/again", "t");
        if (comm->rank() == 0)
          require(checkpoint_digest(folder.text() + "/again") == checkpoint_digest(folder.text(), "t"),
                  label + "the digest");
        const auto losses = train_on(engine, *module, c, 3, 23);
        if (comm->rank() == 0) write_losses(losses, folder.text() + "/again.pt");
      });
      SCOPED_TRACE(label);
      differences.add(difference_of(from, layout, recipe), read_losses(folder.text() + "/again.pt"), expected);
    }
  }
  differences.check();
}

// Experts over other numbers of ranks. The micro-batches of a step are the same.
TEST(LayoutPairs, Experts) {
  using namespace zero::test::moe;
  const auto names = make_net(options_of(1, 1))->named_parameters().keys();
  const auto engine_of = [](const std::shared_ptr<NetImpl>& net, int stage, const std::string& recipe,
                            const Comm& comm) {
    return Engine(net, engine_options(stage, recipe, "", "", kSamples / comm->size()), comm);
  };
  const auto train = [](Engine& engine, NetImpl& net, int begin, int end) {
    auto& comm = engine.communicator();
    const int micros = kSamples / comm.size();
    std::vector<double> losses;
    for (int step = begin; step < end; ++step) {
      auto sum = at::zeros({1});
      for (int micro = 0; micro < micros; ++micro) {
        const auto loss = moe::loss_of(net, step, comm.rank() * micros + micro);
        sum += loss.detach();
        engine.backward(loss);
        engine.step();
      }
      comm.all_reduce(sum)->wait();
      losses.push_back(sum.item<double>() / kSamples);
    }
    return losses;
  };
  Differences differences;
  for (const std::string recipe : {"fp32", "bf16"}) {
    const TempFolder folder(TempFolder::On::Memory);
    expect_passed({"shm", 4}, [&](const Comm& comm) {
      const auto net = make_net(options_of(2, 1));
      auto engine = engine_of(net, 3, recipe, comm);
      train(engine, *net, 0, 3);
      engine.save_checkpoint(folder.text(), "t");
      const auto states = states_of(engine, names);
      const auto losses = train(engine, *net, 3, 23);
      if (comm->rank() != 0) return;
      torch::save(std::vector<at::Tensor>{states}, folder.text() + "/expected.pt");
      write_losses(losses, folder.text() + "/losses.pt");
    });
    for (const auto& [world, ep, stage] :
         std::vector<std::tuple<int, int, int>>{{1, 1, 0}, {2, 2, 3}, {2, 1, 1}, {4, 4, 2}}) {
      const auto label = recipe + ", " + std::to_string(world) + " ranks, ep " + std::to_string(ep);
      expect_passed({"shm", world}, [&, ep = ep, stage = stage](const Comm& comm) {
        const auto net = make_net(options_of(ep, 1));
        auto engine = engine_of(net, stage, recipe, comm);
        engine.load_checkpoint(folder.text());
        std::vector<at::Tensor> saved;
        torch::load(saved, folder.text() + "/expected.pt");
        require(states_of(engine, names).equal(saved[0]), label + ": other states");
        const auto losses = train(engine, *net, 3, 23);
        if (comm->rank() == 0) write_losses(losses, folder.text() + "/again.pt");
      });
      SCOPED_TRACE(label);
      differences.add((ep == 2 ? "ranks of the same expert degree, " : "expert degree, ") + recipe,
                      read_losses(folder.text() + "/again.pt"), read_losses(folder.text() + "/losses.pt"));
    }
  }
  differences.check();
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
