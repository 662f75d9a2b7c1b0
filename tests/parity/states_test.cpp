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
