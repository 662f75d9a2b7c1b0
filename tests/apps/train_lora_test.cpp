// `zero train --model --lora`: which tensors are trained and exported, and whose weights the base has.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/model_runs.h"
#include "unit/interchange/weight_files.h"

namespace zero::test::train_lora_test {
namespace {

using namespace model_runs;

TEST(TrainAdapters, AreTrainedAlone) {
  const auto folder = make_folder();
  const auto plain = train(folder, 2, llama() + Words{"--export", "plain", "--lr", "0"}, 1);
  ASSERT_EQ(plain.code, 0) << plain.err;
  const json base = json::parse(std::ifstream(folder + "/plain/config.json"), nullptr, false);
  EXPECT_EQ(base["eos_token_id"], 256) << "of the tokenizer of bytes";
  EXPECT_EQ(base["pad_token_id"], 256);
  std::filesystem::remove_all(folder + "/out");
  const auto options =
      llama() + Words{"--stage", "3", "--init-from", "plain", "--lora", "rank=2,alpha=4,targets=q_proj+down_proj"};
  const auto run = train(folder, 2, options + Words{"--export", "adapters"}, 4);
  ASSERT_EQ(run.code, 0) << run.err;
  const auto adapters = plain_folder(folder + "/adapters");
  ASSERT_EQ(adapters.size(), 8U) << "two factors of two layers in each of two blocks";
  const std::string key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
  ASSERT_TRUE(adapters.contains(key));
  EXPECT_EQ(adapters.at(key).shape, (std::vector<std::int64_t>{2, 32}));
  bool moved = false;
  for (const auto& [name, tensor] : adapters)
    if (name.find("lora_B") != name.npos)
      for (const float value : tensor.floats()) moved = moved || value != 0;
  EXPECT_TRUE(moved);
  // Without a step's change, merged weights are those that the run began with.
  const auto still = train(folder, 2, options + Words{"--export", "merged", "--merge-lora", "--lr", "0"}, 1);
  ASSERT_EQ(still.code, 0) << still.err;
  const auto merged = plain_folder(folder + "/merged"), wanted = plain_folder(folder + "/plain");
  ASSERT_EQ(merged.size(), wanted.size());
  for (const auto& [name, tensor] : wanted) EXPECT_EQ(merged.at(name).floats(), tensor.floats()) << name;
  const json config = json::parse(std::ifstream(folder + "/adapters/adapter_config.json"), nullptr, false);
  EXPECT_EQ(config["r"], 2);
  EXPECT_EQ(config["base_model_name_or_path"], "plain");
  EXPECT_EQ(config["target_modules"], (json{"q_proj", "down_proj"}));
}

// The base is a checkpoint of whole training, which has no adapters. The first loss is that of the exported weights.
TEST(TrainAdapters, BeginOnTheWeightsOfACheckpoint) {
  const auto folder = make_folder();
  ASSERT_EQ(train(folder, 2, llama() + Words{"--checkpoint-dir", "base", "--export", "plain"}, 3).code, 0);
  const Words adapters = {"--lora", "rank=2", "--stage", "3"};
  std::filesystem::remove_all(folder + "/out");
  const auto exported = train(folder, 2, llama() + adapters + Words{"--init-from", "plain"}, 2);
  std::filesystem::remove_all(folder + "/out");
  const auto resumed =
      train(folder, 2, llama() + adapters + Words{"--checkpoint-dir", "base", "--resume", "auto", "--weights-only"}, 2);
  expect_same(exported, resumed, "--resume");
  // That run has saved adapters. Those of another rank are not replaced by new ones without a word.
  const auto other =
      train(folder, 2,
            llama() + Words{"--lora", "rank=4", "--checkpoint-dir", "base", "--resume", "auto", "--weights-only"}, 2);
  EXPECT_EQ(other.code, 2) << other.err;
  EXPECT_NE(other.err.find("lora_A.weight: has the shape"), std::string::npos) << other.err;
}

}  // namespace
}  // namespace zero::test::train_lora_test
