// Odd but legal programs with layers of experts: a right result, or an error in words on all ranks.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>
#include <zero/library.h>

#include <string>
#include <vector>

#include "parity/mesh_problems.h"
#include "parity/moe_problems.h"
#include "support/folder.h"
#include "support/require.h"

namespace zero::test::moe_soundness_test {
namespace {

using namespace zero::test::moe;
using zero::test::mesh::expect_passed;
using Comm = std::shared_ptr<Communicator>;

bool near(const at::Tensor& got, const at::Tensor& wanted) {
  return (got - wanted).norm().item<double>() <= 2e-5 * wanted.norm().item<double>() + 1e-9;
}

// --- derivatives ----------------------------------------------------------------------------------

// A gradient penalty, against the formula that lets every expert compute every token.
TEST(MoeSoundness, SecondDerivatives) {
  for (const std::int64_t k : {1, 2, 3}) {
    const auto net = make_net(options_of(1, k)), dense = make_net(options_of(1, k));
    const auto penalty = [](NetImpl& of, bool by_mask) {
      const auto x = moe::input_of(2, 0).requires_grad_();
      const auto y = by_mask ? of.forward_by_mask(x) : of.forward(x);
      const auto gradient = torch::autograd::grad({y.pow(2).sum() + of.loss}, {x}, {}, true, /*create_graph=*/true)[0];
      gradient.pow(2).sum().backward();
    };
    penalty(*net, false);
    penalty(*dense, true);
    for (const auto& item : net->named_parameters()) {
      const auto wanted = dense->named_parameters()[item.key()].grad();
      EXPECT_TRUE(near(item.value().grad(), wanted)) << "k " << k << ": " << item.key();
    }
  }
}

// A rank without tokens has no graph that leads to them; its backward takes part in the exchange of rows all the same.
TEST(MoeSoundness, TokensWithoutAGradientOnOneRank) {
  for (const auto& place : {Place{"shm", 2}, Place{"gloo", 2}})
    expect_passed(place, [](const Comm& comm) {
      const auto net = make_net(options_of(2, 1));
      Engine engine(net, engine_options(1), comm);
      at::Tensor loss;
      if (comm->rank() == 0) {
        loss = loss_of(*net, 3, 0);
      } else {
        auto h = at::zeros({0, kHidden});
        for (const auto& block : *net->blocks) h = h + std::get<0>(block->as<MoEImpl>()->forward(h));
        loss = net->head(h).sum();
      }
      engine.backward(loss);
      const auto dense = make_net(options_of(1, 1));
      (loss_of(*dense, 3, 0, /*by_mask=*/true) / 2).backward();
      for (const auto& item : dense->named_parameters())
        require(near(engine.gradient(item.key()), item.value().grad()), item.key());
    });
}

// The first layer of a model, on data: no rank's tokens need a gradient, and only one rank's experts are trained.
TEST(MoeSoundness, ExpertsOfOneRankAreFrozen) {
  expect_passed({"shm", 2}, [](const Comm& comm) {
    std::vector<at::Tensor> gradients;
    for (const bool frozen : {false, true}) {
      const auto net = make_net(options_of(2, 1));
      Engine engine(net, engine_options(1), comm);
      for (auto& item : net->named_parameters())
        if (frozen && (contains(item.key(), "experts.2.") || contains(item.key(), "experts.3.")))
          item.value().requires_grad_(false);
      const auto x = mesh::draw({15, kHidden}, static_cast<std::uint64_t>(comm->rank()));
      engine.backward(std::get<0>((*net->blocks)[0]->as<MoEImpl>()->forward(x)).pow(2).sum());
      gradients.push_back(engine.gradient("blocks.0.experts.0.up.weight"));
    }
    require(gradients[0].equal(gradients[1]) && gradients[0].abs().sum().item<double>() > 0, "another gradient");
  });
}

TEST(MoeSoundness, OneExpertIsUnfrozen) {
  expect_passed({"shm", 2}, [](const Comm& comm) {
    const auto net = make_net(options_of(2, 1));
    const auto set = [&](const std::string& what, bool trained) {
      for (auto& item : net->named_parameters())
        if (contains(item.key(), what)) item.value().requires_grad_(trained);
    };
    set(".experts.", false);
    Engine engine(net, engine_options(1), comm);
    const auto step = [&] {
      engine.backward(loss_of(*net, 1, comm->rank()));
      engine.step();
    };
    step();
    set("blocks.0.experts.3.", true);
    const auto text = error_of(step, "an expert that is unfrozen alone");
    require(contains(text, "in the same way on every rank"), text);
  });
  expect_passed({"shm", 2}, [](const Comm& comm) {
    const auto net = make_net(options_of(2, 1));
    for (auto& item : net->named_parameters())
      if (contains(item.key(), ".experts.")) item.value().requires_grad_(false);
    Engine engine(net, engine_options(1), comm);
    for (auto& item : net->named_parameters()) item.value().requires_grad_(true);
    engine.backward(loss_of(*net, 1, comm->rank()));
    const auto dense = make_net(options_of(1, 1));
    for (int rank = 0; rank < 2; ++rank) (loss_of(*dense, 1, rank, /*by_mask=*/true) / 2).backward();
    const auto name = "blocks.1.experts.3.up.weight";
    require(near(engine.gradient(name), dense->named_parameters()[name].grad()), "all are unfrozen");
  });
}

// --- what an expert is ----------------------------------------------------------------------------

// Counts the rows that it computed.
struct CounterImpl : torch::nn::Cloneable<CounterImpl> {
  CounterImpl() { reset(); }
  void reset() override {
    down = register_module("down", torch::nn::Linear(kHidden, kHidden));
    rows = register_buffer("rows", at::zeros({}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    rows += x.size(0);
    return down(x);
  }
  torch::nn::Linear down{nullptr};
  at::Tensor rows;
};
TORCH_MODULE(Counter);

struct Counted : torch::nn::Module {
  explicit Counted(int ep_size) {
    auto options = options_of(ep_size, 1);
    options.drop_tokens = false;
    torch::manual_seed(3);
    moe = register_module("moe", MoE(options, torch::nn::AnyModule(Counter())));
  }
  std::vector<std::int64_t> rows() const {
    std::vector<std::int64_t> all;
    for (const auto& item : named_buffers()) all.push_back(item.value().item<std::int64_t>());
    return all;
  }
  MoE moe{nullptr};
};

// Each rank runs its own experts only; states and checkpoints have the buffers of all.
TEST(MoeSoundness, BuffersOfAllExperts) {
  const TempFolder folder;
  expect_passed({"shm", 2}, [&](const Comm& comm) {
    const auto net = std::make_shared<Counted>(2);
    Engine engine(net, engine_options(1), comm);
    const auto [y, l_aux, counts] = net->moe(mesh::draw({15, kHidden}, static_cast<std::uint64_t>(comm->rank())));
    engine.backward(y.pow(2).sum());
    engine.step();
    auto total = counts.to(at::kFloat);
    comm->all_reduce(total)->wait();
    std::vector<std::int64_t> wanted;
    for (std::int64_t e = 0; e < kExperts; ++e) wanted.push_back(total[e].item<std::int64_t>());
    engine.save_checkpoint(folder.path(), "counted");
    require(net->rows() == wanted, "after a save");
    for (const auto& item : net->named_buffers()) item.value().add_(comm->rank());
    (void)engine.full_state_dict();
    auto later = wanted;
    later[2] += 1, later[3] += 1;  // those of rank 1
    require(net->rows() == later, "after full_state_dict");
    const auto whole = std::make_shared<Counted>(1);
    Engine(whole, engine_options(1), comm).load_checkpoint(folder.path());
    require(whole->rows() == wanted, "loaded with another degree");
  });
}

TEST(MoeSoundness, CopiesAreTrainedAndEvaluatedAsTheOriginal) {
  namespace nn = torch::nn;
  nn::Sequential layers(nn::Linear(kHidden, kHidden), nn::Dropout(0.5));
  layers[0]->as<nn::Linear>()->bias.requires_grad_(false);
  layers[1]->eval();
  const MoE moe(options_of(1, 1), layers);
  for (const auto& item : moe->named_parameters())
    EXPECT_EQ(item.value().requires_grad(), !item.key().ends_with(".bias")) << item.key();
  for (const auto& item : moe->named_modules())
    EXPECT_EQ(item.value()->is_training(), item.value()->as<nn::Dropout>() == nullptr) << item.key();
  EXPECT_FALSE(layers[1]->is_training());
}

// A layer under autocast returns the dtype of its input, with experts of the lower precision.
TEST(MoeSoundness, UnderAutocast) {
  const auto net = make_net(options_of(1, 2));
  const auto x = mesh::draw({15, kHidden}, 4);
  auto& layer = *(*net->blocks)[0]->as<MoEImpl>();
  const auto exact = std::get<0>(layer.forward(x));
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto rounded = std::get<0>(layer.forward(x));
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(rounded.scalar_type(), at::kFloat);
  EXPECT_FALSE(rounded.equal(exact));
  EXPECT_TRUE(at::allclose(rounded, exact, 3e-2, 3e-2));
}

TEST(MoeSoundness, AMaskOfAnotherShape) {
  const auto net = make_net(options_of(1, 1));
  auto& layer = *(*net->blocks)[0]->as<MoEImpl>();
  const auto x = mesh::draw({3, 5, kHidden}, 4);
  const auto mask = at::arange(15).ge(4);
  const auto y = std::get<0>(layer.forward(x, mask.view({3, 5})));
  EXPECT_TRUE(y.equal(std::get<0>(layer.forward(x, mask))));
  EXPECT_TRUE(y.view({15, kHidden}).narrow(0, 0, 4).eq(0).all().item<bool>());
  const auto text = error_of([&] { (void)layer.forward(x, mask.view({5, 3})); }, "a mask of another shape");
  EXPECT_TRUE(contains(text, "used_token of shape [5, 3]") && contains(text, "expected [3, 5] or [15]")) << text;
}

// --- names ----------------------------------------------------------------------------------------

// Ranks have different experts, so those of a layer are one unit. A name below it is no mistake.
TEST(MoeSoundness, UnitsThatNameExperts) {
  expect_passed({"shm", 2}, [](const Comm& comm) {
    const auto units = R"(, "libzero": {"units": ["blocks.0.experts.0", "blocks.0.experts.3.up", "blocks.1"]})";
    const auto net = make_net(options_of(2, 1));
    Engine engine(net, engine_options(3, "fp32", units), comm);
    std::string names;
    for (const auto& unit : engine.units()) names += unit.first + " ";
    require(contains(names, "blocks.0.experts ") && contains(names, "blocks.1.experts ") &&
                !contains(names, "experts.0") && !contains(names, "experts.3"),
            names);
  });
}

TEST(MoeSoundness, ExpertsThatDiffer) {
  expect_passed({"shm", 2}, [](const Comm& comm) {
    const auto net = make_net(options_of(2, 1));
    net->named_parameters()["blocks.0.experts.2.up.bias"].requires_grad_(false);
    const auto text = error_of([&] { Engine(net, engine_options(1), comm); }, "one frozen expert");
    require(contains(text, "blocks.0.experts.2.up.bias is frozen and blocks.0.experts.0.up.bias is trained"), text);
  });
  expect_passed({"shm", 2}, [](const Comm& comm) {
    struct Twice : torch::nn::Module {
      Twice() {
        const MoE moe(options_of(2, 1), torch::nn::AnyModule(Expert()));
        register_module("first", moe);
        register_module("second", moe);
      }
    };
    const auto text = error_of([&] { Engine(std::make_shared<Twice>(), engine_options(1), comm); }, "a layer twice");
    require(contains(text, "first.experts.0.up.weight is also second.experts.0.up.weight"), text);
  });
}

// A scope for a module: every rank names the same expert, one has it.
TEST(MoeSoundness, AScopeOfAnExpertsModule) {
  expect_passed({"shm", 2}, [](const Comm& comm) {
    const auto net = make_net(options_of(2, 1));
    Engine engine(net, engine_options(3), comm);
    const auto experts = (*net->blocks)[0]->named_children()["experts"]->children();
    {
      const auto scope = engine.gathered_parameters(*experts[3], /*modify=*/true);
      const at::NoGradGuard no_grad;
      if (comm->rank() == 1) experts[3]->parameters()[0].fill_(7);
    }
    require(engine.parameter_state("blocks.0.experts.3.up.weight").eq(7).all().item<bool>(), "the new values");
  });
}

// Sequence parallelism and experts over the same ranks send all-to-alls of their own.
TEST(MoeSoundness, TrafficOfExpertsIsCountedApart) {
  expect_passed({"shm", 2}, [](const Comm& comm) {
    const auto net = make_net(options_of(2, 1));
    Engine engine(net, engine_options(1, "fp32", R"(, "sequence_parallel_size": 2)"), comm);
    comm->reset_stats();
    engine.backward(loss_of(*net, 1, comm->rank()));
    const auto& counted = comm->stats().by_op;
    require(counted.contains("ep.all_to_all") && !counted.contains("all_to_all"), "names of the counters");
  });
}

// One expert's gradients overflow fp16: every rank skips the step, and the scale falls equally.
TEST(MoeSoundness, OneExpertOverflows) {
  expect_passed({"shm", 2}, [](const Comm& comm) {
    const auto net = make_net(options_of(2, 2));
    Engine engine(net, engine_options(2, "fp16"), comm);
    const auto name = "blocks.1.experts.3.down.weight";
    engine.set_parameter_state(name, "master", at::full({kHidden, 20}, 6e4));
    const auto before = engine.parameter_state("blocks.0.experts.0.up.weight");
    engine.backward(loss_of(*net, 1, comm->rank()));
    const auto result = engine.step();
    require(result.overflow && !result.updated, "rank " + std::to_string(comm->rank()) + " made the step");
    require(engine.parameter_state("blocks.0.experts.0.up.weight").equal(before), "an expert of the other rank moved");
  });
}

}  // namespace
}  // namespace zero::test::moe_soundness_test
