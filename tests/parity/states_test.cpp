// Optimizer states: the digest includes them, and each tile has its own.
#include <gtest/gtest.h>
#include <zero/zero.h>

#include <ATen/CPUGeneratorImpl.h>

#include <filesystem>

#include "parity/problems.h"

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
