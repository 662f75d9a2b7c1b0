// The DeepSpeed example configurations train a tiny GPT on two ranks, unchanged, with the same bits as at every stage
// without offload.
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>
#include <mutex>

#include <zero/library.h>

#include "config/document.h"
#include "models/gpt.h"
#include "support/nightly.h"

namespace zero::deepspeed_configs_test {
namespace {

const std::string kFolder = std::string(ZERO_SOURCE_DIR) + "/configs/deepspeed-examples/";

// Keys that the files do not set: batch sizes and the optimizer, which their programs set in code.
std::vector<Setting> completed(const Options& options) {
  std::vector<Setting> settings;
  const auto& s = options.settings();
  if (!s.train_batch_size && !s.micro_batch_size) settings.push_back({"train_micro_batch_size_per_gpu", "2"});
  if (s.optimizer.type == config::OptimizerType::None) settings.push_back({"optimizer.type", "AdamW"});
  return settings;
}

struct Result {
  std::string hash;
  std::vector<double> losses, scales;
};

std::mutex seeding;

Result train(const Options& options, int steps) {
  Result result;
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    models::GptConfig shape;
    shape.layers = 2;
    shape.hidden = 32;
    shape.heads = 2;
    shape.sequence = 16;
    // Ranks as threads share torch's generator, so they initialise weights one after the other.
    std::unique_lock turn(seeding);
    torch::manual_seed(1);
    models::Gpt model(shape);
    turn.unlock();
    Engine engine(model.ptr(), options, comm);
    auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(7 + comm->rank()));
    for (int step = 0; step < steps; ++step) {
      const auto tokens = torch::randint(0, 256, {engine.micro_batch_size(), 17}, generator, torch::kLong);
      auto loss = model->forward(tokens.narrow(1, 0, 16), tokens.narrow(1, 1, 16));
      engine.backward(loss);
      const auto r = engine.step();
      if (comm->rank() == 0) {
        result.losses.push_back(loss.item<double>());
        result.scales.push_back(r.loss_scale);
      }
    }
    const auto hash = engine.state_hash();
    if (comm->rank() == 0) result.hash = hash;
  });
  return result;
}

TEST(DeepSpeedConfigurations, RunAndAgreeOverStagesAndTiers) {
  int ran = 0, offloaded = 0;
  test::OneIn part(3);
  for (const auto& entry : std::filesystem::directory_iterator(kFolder)) {
    SCOPED_TRACE(entry.path().filename().string());
    auto options = Options::from_file(entry.path());
    options = options.with(completed(options));
    for (const char* block : {"zero_optimization.offload_optimizer", "zero_optimization.offload_param"})
      if (options.document().is_set(std::string(block) + ".nvme_path"))  // a disk of the document's machine
        options = options.with(std::string(block) + ".nvme_path", std::filesystem::temp_directory_path().string());
    const auto own = train(options, 4);
    ASSERT_EQ(own.losses.size(), 4u);
    for (double loss : own.losses) EXPECT_TRUE(std::isfinite(loss) && loss > 0 && loss < 8) << loss;
    const auto resting =
        options.with("zero_optimization.offload_optimizer", "null").with("zero_optimization.offload_param", "null");
    const auto& zero = options.settings().zero;
    offloaded += zero.offload_optimizer.device != config::OffloadDevice::None ? 1 : 0;
    for (int stage = 0; stage <= 3; ++stage) {
      if (!part.take()) continue;
      const auto other = train(resting.with("zero_optimization.stage", std::to_string(stage)), 4);
      EXPECT_EQ(other.hash, own.hash) << "stage " << stage;
      EXPECT_EQ(other.losses, own.losses) << "stage " << stage;
    }
    ++ran;
  }
  EXPECT_GE(ran, 10);
  EXPECT_GE(offloaded, 2);
}

// The loss scale of the fp16 file: 2^32 at first, and halved only by overflow.
TEST(DeepSpeedConfigurations, TheLoggedFp16RunStartsAtTwoToTheThirtyTwo) {
  auto options = Options::from_file(kFolder + "gpt2-squad-zero1-as-logged.json");
  const auto result = train(options.with(completed(options)), 4);
  EXPECT_EQ(result.scales[0], 4294967296.0) << "the first overflow is tolerated (hysteresis 2)";
  EXPECT_EQ(result.scales[1], 2147483648.0);
  EXPECT_EQ(result.scales[2], 1073741824.0);
}

}  // namespace
}  // namespace zero::deepspeed_configs_test
