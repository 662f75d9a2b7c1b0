// Optimizer states: the digest includes them, and each tile has its own.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>
#include <zero/library.h>
#include <zero/unsaved_buffers.h>

#include <ATen/CPUGeneratorImpl.h>

#include <filesystem>

#include "parity/problems.h"
#include "support/folder.h"
#include "support/require.h"

namespace zero::test::states_test {
namespace {

std::string json_of(const std::string& optimizer, const std::string& zero) {
  return R"({"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "optimizer": {"type": "AdamW", "params": )" +
         optimizer + R"(}, "zero_optimization": )" + zero + "}";
}

// With a learning rate of zero, a step changes moments but no parameter.
TEST(StateHash, ChangesWithMomentsAlone) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      torch::nn::Linear net(5, 3);
      fill_parameters(*net, 7);
      Engine engine(
          net,
          Options::from_json(json_of(R"({"lr": 0, "weight_decay": 0})", R"({"stage": )" + std::to_string(stage) + "}")),
          comm);
      const auto hash = engine.state_hash();
      EXPECT_EQ(engine.state_hash(), hash);
      const auto before = engine.full_state_dict();
      engine.backward(net(at::ones({2, 5})).pow(2).mean());
      engine.step();
      const auto after = engine.full_state_dict();
      for (const auto& [name, value] : before) EXPECT_TRUE(at::equal(value, after.at(name))) << name;
      EXPECT_NE(engine.state_hash(), hash) << "stage " << stage;
    });
  }
}

// The moments of the first step are those of the formula; shards are read right after the step, whose writes to files
// may be under way; a master that is set is the parameter that the next forward reads.
TEST(ParameterState, IsThatOfTheFormulaOnEveryTier) {
  const auto folder = std::filesystem::temp_directory_path().string();
  const auto nvme =
      R"(, "offload_optimizer": {"device": "nvme", "pipeline_write": true, "nvme_path": ")" + folder + "\"}";
  const std::string cpu = R"(, "offload_optimizer": {"device": "cpu"})";
  for (const auto& [stage, offload] :
       std::vector<std::pair<int, std::string>>{{0, ""}, {1, ""}, {1, nvme}, {2, cpu}, {3, ""}, {3, cpu}, {3, nvme}}) {
    SCOPED_TRACE("stage " + std::to_string(stage) + offload);
    torch::nn::Linear plain(64, 48);
    fill_parameters(*plain, 7);
    const auto x = at::linspace(-1, 1, 128).view({2, 64});
    plain(x).pow(2).mean().backward();
    const auto gradient = plain->weight.grad();
    run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      torch::nn::Linear net(64, 48);
      fill_parameters(*net, 7);
      const auto zero = R"({"stage": )" + std::to_string(stage) + offload + "}";
      Engine engine(net, Options::from_json(json_of(R"({"lr": 0, "weight_decay": 0, "betas": [0.5, 0.75]})", zero)),
                    comm);
      engine.backward(net(x).pow(2).mean());
      engine.step();
      const auto own = engine.own_parameter_state("weight", "exp_avg_sq");
      const auto whole = engine.parameter_state("weight", "exp_avg_sq");
      EXPECT_TRUE(at::allclose(engine.parameter_state("weight", "exp_avg"), 0.5 * gradient, 1e-5, 1e-8));
      EXPECT_TRUE(at::allclose(whole, 0.25 * gradient * gradient, 1e-5, 1e-10));
      EXPECT_TRUE(at::equal(own.values.cpu(), whole.view({-1}).narrow(0, own.begin, own.values.numel())));
      EXPECT_TRUE(at::equal(engine.parameter_state("weight"), plain->weight.detach()));

      engine.set_parameter_state("weight", "master", at::full({48, 64}, 3.0 + comm->rank()));  // rank 0's
      EXPECT_TRUE(at::equal(at::relu(net->weight), at::full({48, 64}, 3.0)));
      engine.set_own_parameter_state("weight", "exp_avg", at::full({own.values.numel()}, 10.0 + comm->rank()));
      const auto flat = engine.parameter_state("weight", "exp_avg").view({-1});
      EXPECT_TRUE(flat.narrow(0, own.begin, own.values.numel()).eq(10.0 + comm->rank()).all().item<bool>());
      try {
        engine.parameter_state("weight", "momentum");
        ADD_FAILURE() << "no optimizer has it";
      } catch (const ConfigError& error) {
        EXPECT_NE(std::string(error.what()).find("expected one of master, exp_avg, exp_avg_sq"), std::string::npos);
      }
    });
  }
}

TEST(UnitModules, AreTheListsEntriesWhateverIsMerged) {
  torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::ReLU(), torch::nn::Linear(2, 2));
  const auto json = json_of(R"({"lr": 0.1})", R"({"stage": 3, "stage3_param_persistence_threshold": 0})");
  Engine engine(net, Options::from_json(json), Communicator::local());
  EXPECT_EQ(engine.unit_modules(), (std::vector<std::string>{"0", "2"}));
}

// --- what a module holds besides ordinary parameters --------------------------------------------

struct TablesImpl : torch::nn::Module, UnsavedBuffers {
  torch::nn::Linear layer{nullptr};
  at::Tensor table, mean;
  TablesImpl() {
    layer = register_module("layer", torch::nn::Linear(4, 4));
    fill_parameters(*layer, 7);
    table = register_buffer("table", at::zeros({3}));
    mean = register_buffer("mean", at::ones({2}));
  }
  bool is_unsaved(const std::string& name) const override { return name == "table"; }
};
TORCH_MODULE(Tables);

template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "no ConfigError";
}

Options stage_of(int stage) {
  return Options::from_json(json_of(R"({"lr": 0.1})", R"({"stage": )" + std::to_string(stage) + "}"));
}

// They are rank 0's at first, each rank's own in a checkpoint, and in no file of weights.
TEST(UnsavedBuffers, AreOfTheResumeAlone) {
  const TempFolder folder;
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    Tables saved, loaded;
    {
      saved->table.fill_(1 + comm->rank());
      Engine engine(saved, stage_of(1), comm);
      EXPECT_TRUE(saved->table.equal(at::ones({3})));
      saved->table.fill_(5 + comm->rank());
      engine.save_checkpoint(folder.text(), "t");
      const auto hash = engine.logical_hash();
      saved->table.fill_(0);
      EXPECT_EQ(engine.logical_hash(), hash);
      engine.export_weights(folder.file("out"));
      EXPECT_EQ(engine.import_weights(folder.file("out")).taken.size(), 3u);
    }
    Engine engine(loaded, stage_of(1), comm);
    engine.load_checkpoint(folder.text());
    EXPECT_TRUE(loaded->table.equal(at::full({3}, 5.0 + comm->rank())));
    loaded->table.fill_(0);
    EXPECT_TRUE(contains(error_of([&] { engine.load_checkpoint(folder.text(), "t", {.weights_only = true}); }),
                         "no ConfigError"));
    EXPECT_TRUE(loaded->table.equal(at::zeros({3})));
  });
}

// The ranks have different numbers of elements.
TEST(SparseBuffers, AreRankZeros) {
  const TempFolder folder;
  for (const auto layout : {at::kSparse, at::kSparseCsr})
    run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      torch::nn::Linear net(4, 4);
      auto dense = at::eye(4);
      dense[0].fill_(comm->rank());
      const auto graph =
          net->register_buffer("graph", layout == at::kSparse ? dense.to_sparse() : dense.to_sparse_csr());
      Engine engine(net, stage_of(2), comm);
      auto wanted = at::eye(4);
      wanted[0].fill_(0);
      EXPECT_EQ(graph.layout(), layout);
      EXPECT_TRUE(graph.to_dense().equal(wanted));
      EXPECT_TRUE(contains(error_of([&] { engine.save_checkpoint(folder.text(), "t"); }), "buffer graph"));
    });
}

TEST(Names, ThatNoFileCanHoldAreRefused) {
  torch::nn::Linear net(2, 2);
  net->register_buffer("a\nb", at::ones({1}));
  EXPECT_TRUE(
      contains(error_of([&] { Engine(net, stage_of(0), Communicator::local()); }), "buffer a\\nb: has a control"));
  torch::nn::Linear other(2, 2);
  other->register_parameter(std::string(4001, 'x'), at::ones({1}));
  EXPECT_TRUE(contains(error_of([&] { Engine(other, stage_of(0), Communicator::local()); }), "a name of 4001 bytes"));
}

// As parameters are, and reported.
TEST(ImportedBuffers, AreNarrowed) {
  const TempFolder folder;
  const auto net_of = [](at::ScalarType dtype) {
    torch::nn::Linear net(2, 2);
    net->register_buffer("mean", at::full({2}, 0.1, dtype));
    return net;
  };
  Engine(net_of(at::kDouble), stage_of(0), Communicator::local()).export_weights(folder.file("wide"));
  const auto net = net_of(at::kFloat);
  net->buffers()[0].zero_();
  Engine engine(net, stage_of(0), Communicator::local());
  const auto report = engine.import_weights(folder.file("wide"));
  EXPECT_TRUE(net->buffers()[0].equal(at::full({2}, 0.1F)));
  ASSERT_EQ(report.converted.size(), 1u);
  EXPECT_TRUE(contains(report.converted[0], "mean: F64, largest relative change"));
}

// Rows of one tensor, and columns, which lie between one another.
TEST(PartsOfOneTensor, AreTrainedEachForItself) {
  struct Net : torch::nn::Module {
    at::Tensor a, b, left, right;
    Net() {
      const auto rows = at::linspace(-1, 1, 32).view({2, 4, 4}), columns = at::linspace(-2, 1, 16).view({4, 4});
      a = register_parameter("a", rows[0]), b = register_parameter("b", rows[1]);
      left = register_parameter("left", columns.narrow(1, 0, 2));
      right = register_parameter("right", columns.narrow(1, 2, 2));
    }
    at::Tensor loss() {
      const auto x = at::linspace(-1, 1, 8).view({2, 4}).matmul(a).tanh().matmul(b);
      return (x.matmul(left) * x.matmul(right)).pow(2).mean();
    }
  };
  Net plain;
  plain.loss().backward();
  for (const int stage : {0, 3})
    run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      const auto net = std::make_shared<Net>();
      Engine engine(net, stage_of(stage), comm);
      engine.backward(net->loss());
      for (const auto& item : plain.named_parameters())
        EXPECT_TRUE(at::allclose(engine.gradient(item.key()), item.value().grad())) << item.key();
    });
}

// A target network that follows the trained one. What is sharded, or has a master, would lose the write.
TEST(FrozenParameters, MayBeWrittenByForwardBelowStageThree) {
  for (const int stage : {0, 1, 2, 3})
    run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
      for (const auto& p : net[1]->parameters()) p.requires_grad_(false);
      Engine engine(net, stage_of(stage), comm);
      for (const auto& p : net[2]->parameters()) p.requires_grad_(false);
      const auto write = [&](std::size_t layer) {
        return error_of([&] {
          const at::NoGradGuard no_grad;
          net[layer]->parameters()[0].fill_(3);
        });
      };
      EXPECT_EQ(write(1) == "no ConfigError", stage < 3);
      EXPECT_TRUE(contains(write(2), "2.weight"));
      if (stage < 3) EXPECT_TRUE(engine.parameter_state("1.weight").eq(3).all().item<bool>());
    });
}

// Several tiles of several elements each: every tile is updated with its own moments.
TEST(Tiles, OfALargeParameterGiveTheBitsOfOneVector) {
  const auto folder = std::filesystem::temp_directory_path().string();
  const auto train = [](const std::string& zero) {
    torch::nn::Linear net(256, 150);  // 38550 elements; a tile has 8192
    fill_parameters(*net, 7);
    Engine engine(net, Options::from_json(json_of(R"({"lr": 0.01})", zero)), Communicator::local());
    for (int step = 0; step < 4; ++step) {
      auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(step + 1));
      engine.backward(net(at::randn({2, 256}, generator, at::TensorOptions())).pow(2).mean());
      engine.step();
    }
    return engine.state_hash();
  };
  const auto expected = train(R"({"stage": 1})");
  for (const char* buffers : {"", R"(, "buffer_count": 4)", R"(, "buffer_count": 8, "pipeline_read": true)"}) {
    const auto block = R"("sub_group_size": 0, "offload_optimizer": {"device": "nvme", "nvme_path": ")" + folder +
                       "\"" + buffers + "}";
    EXPECT_EQ(train(R"({"stage": 1, )" + block + "}"), expected) << buffers;
    EXPECT_EQ(train(R"({"stage": 3, )" + block + R"(, "offload_param": {"device": "nvme", "nvme_path": ")" + folder +
                    R"(", "max_in_cpu": 0}})"),
              expected)
        << buffers;
  }
}

}  // namespace
}  // namespace zero::test::states_test
