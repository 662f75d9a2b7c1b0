// `zero train --init-from`: a run begins with weights in others' names, or with a checkpoint's weights and states of
// the optimizer. What it has after a step is compared with the files, and with Adam's formulas.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "support/train_command.h"
#include "unit/interchange/weight_files.h"

namespace zero::test::train_init_test {
namespace {

using Words = std::vector<std::string>;

// The tensors that the only rank saved, as <kind>/<name>.
PlainTensors saved_in(const std::string& checkpoint) {
  PlainTensors saved;
  for (const auto& [key, tensor] : plain_tensors(checkpoint + "/rank-00000.safetensors"))
    saved[key.substr(0, key.find('@'))] = tensor;
  return saved;
}

// Weights that transformers wrote, whose GPT has another vocabulary than bytes: the rate of the first step is 0, so
// that they are saved as they were taken.
TEST(TrainInit, TakesWeightsThatTransformersWrote) {
  Words options = {"--init-from",      hf_model("hf-gpt2").string(),
                   "--init-names",     "gpt2",
                   "--init-partial",   "token.weight",
                   "--partial",        "output.weight",
                   "--checkpoint-dir", "ck"};
  for (const char* const setting : {"libzero.model.hidden=8", "libzero.model.heads=2", "libzero.model.seq_length=16"})
    options.insert(options.end(), {"--set", setting});
  const auto run = train_command(1, options, 1);
  ASSERT_EQ(run.code, 0) << run.err;
  ASSERT_FALSE(run.log.empty());
  ASSERT_EQ(run.log[0]["lr"], 0) << "the first step of a warm-up";
  EXPECT_NE(run.err.find("not in it: token.weight"), std::string::npos) << run.err;
  const auto saved = saved_in(run.folder + "/ck/global_step1");
  const std::vector<std::pair<std::string, std::string>> parts = {{"norm1", "ln_1"},      {"norm2", "ln_2"},
                                                                  {"qkv", "attn.c_attn"}, {"projection", "attn.c_proj"},
                                                                  {"up", "mlp.c_fc"},     {"down", "mlp.c_proj"}};
  int compared = 0;
  for (const auto& [name, tensor] : plain_folder(hf_model("hf-gpt2"))) {
    std::string ours = name.substr(std::string("transformer.").size());
    if (ours == "wte.weight") continue;
    if (ours == "wpe.weight") ours = "position.weight";
    if (ours.starts_with("ln_f.")) ours.replace(0, 4, "norm");
    if (ours.starts_with("h.")) ours.replace(0, 1, "blocks");
    for (const auto& [own, theirs] : parts)
      if (const auto at = ours.find("." + theirs + "."); at != std::string::npos)
        ours.replace(at + 1, theirs.size(), own);
    auto values = tensor.floats();
    // Their products store [in, out].
    if (tensor.shape.size() == 2 && ours.starts_with("blocks")) {
      const auto rows = static_cast<std::size_t>(tensor.shape[0]), columns = static_cast<std::size_t>(tensor.shape[1]);
      for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t j = 0; j < columns; ++j) values[j * rows + i] = tensor.floats()[i * columns + j];
    }
    ++compared;
    ASSERT_TRUE(saved.contains("master/" + ours)) << name << " as " << ours;
    EXPECT_EQ(saved.at("master/" + ours).floats(), values) << name;
  }
  EXPECT_EQ(compared, 27);

  options[3] = "llama";
  const auto other = train_command(1, options, 1, run.folder);
  EXPECT_EQ(other.code, 2) << other.err;
  EXPECT_NE(other.err.find("does not fit the model"), std::string::npos) << other.err;
}

// One step from a checkpoint's weights, with and without its states: the second gives the gradient, and both together
// what Adam must make of them.
TEST(TrainInit, TakesStatesOfTheOptimizer) {
  const auto base = train_command(1, {"--checkpoint-dir", "base"}, 4);
  ASSERT_EQ(base.code, 0) << base.err;
  const Words from = {"--init-from", base.folder + "/base/global_step4"};
  auto with = from, without = from;
  with.insert(with.end(), {"--init-optimizer", "--checkpoint-dir", "with"});
  without.insert(without.end(), {"--checkpoint-dir", "without"});
  const auto plain = train_command(1, without, 1, base.folder);
  ASSERT_EQ(plain.code, 0) << plain.err;
  const auto run = train_command(1, with, 5, base.folder);
  ASSERT_EQ(run.code, 0) << run.err;
  ASSERT_EQ(run.losses.size(), 1U) << "the fifth step";
  EXPECT_EQ(run.losses, plain.losses) << "the same weights and samples";
  const double rate = run.log[0]["lr"], beta1 = 0.9, beta2 = 0.95, decay = 0.1, eps = 1e-8;
  EXPECT_GT(rate, 0);

  const auto before = saved_in(base.folder + "/base/global_step4"),
             after = saved_in(base.folder + "/with/global_step5"),
             first = saved_in(base.folder + "/without/global_step1");
  std::size_t compared = 0;
  for (const auto& [key, tensor] : before) {
    if (!key.starts_with("master/")) continue;
    const auto name = key.substr(7), of_m = "opt.exp_avg/" + name, of_v = "opt.exp_avg_sq/" + name;
    const auto weights = tensor.floats(), new_weights = after.at(key).floats(), m = before.at(of_m).floats(),
               new_m = after.at(of_m).floats(), own_m = first.at(of_m).floats(), v = before.at(of_v).floats(),
               new_v = after.at(of_v).floats(), own_v = first.at(of_v).floats();
    EXPECT_EQ(first.at(key).floats(), weights) << "the rate of a first step is 0";
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const double wanted_m = beta1 * m[i] + own_m[i], wanted_v = beta2 * v[i] + own_v[i];
      ASSERT_NEAR(new_m[i], wanted_m, 1e-6 * (std::abs(m[i]) + std::abs(own_m[i]))) << key << " " << i;
      ASSERT_NEAR(new_v[i], wanted_v, 1e-6 * wanted_v) << key << " " << i;
      const double change =
          wanted_m / (1 - std::pow(beta1, 5)) / (std::sqrt(wanted_v / (1 - std::pow(beta2, 5))) + eps);
      ASSERT_NEAR(new_weights[i], weights[i] * (1 - rate * decay) - rate * change, 1e-6 * std::abs(weights[i]) + 1e-8)
          << key << " " << i;
      ++compared;
    }
  }
  EXPECT_GT(compared, 40000U);
}

}  // namespace
}  // namespace zero::test::train_init_test
