// Options and construction of the GPT for measurements (bench_gpt.h).
#include "lab/bench/bench_gpt.h"

#include <torch/types.h>
#include <zero/errors.h>

#include <mutex>
#include <stdexcept>

namespace zero::cli {

void GptChoice::declare(Command& c) {
  const auto standard = [](std::int64_t value) { return " (" + std::to_string(value) + ")"; };
  c.option("--model", preset, "NAME", models);
  c.option("--layers", shape.layers, "N", "blocks" + standard(shape.layers), 1, 1000);
  c.option("--hidden", shape.hidden, "N", "width" + standard(shape.hidden), 1, 65536);
  c.option("--heads", shape.heads, "N", "attention heads" + standard(shape.heads), 1, 1024);
  c.option("--sequence", shape.sequence, "N", "tokens per sample" + standard(shape.sequence), 1, 1 << 20);
  c.option("--vocabulary", shape.vocabulary, "N", "size of the vocabulary" + standard(shape.vocabulary), 2, 1 << 24);
}

models::GptConfig GptChoice::chosen(const Command& command) const {
  auto config = shape;
  try {
    if (!preset.empty()) {
      const auto known = models::GptConfig::preset(preset);
      if (!command.given("--layers")) config.layers = known.layers;
      if (!command.given("--hidden")) config.hidden = known.hidden;
      if (!command.given("--heads")) config.heads = known.heads;
      if (!command.given("--sequence")) config.sequence = known.sequence;
      if (!command.given("--vocabulary")) config.vocabulary = known.vocabulary;
    }
    config.validate();
  } catch (const std::invalid_argument& error) {
    throw ConfigError(error.what());
  }
  return config;
}

models::Gpt make_gpt(const models::GptConfig& config, std::int64_t seed) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  return models::Gpt(config);
}

std::vector<Setting> settings_of(const std::vector<std::string>& texts) {
  std::vector<Setting> values;
  for (const auto& text : texts) {
    const auto equals = text.find('=');
    const std::string key = text.substr(0, equals);
    if (equals == std::string::npos || equals == 0)
      throw ConfigError("[--set] got \"" + text.substr(0, 80) + "\", expected KEY=VALUE");
    if (key == "zero_optimization.stage" || key == "bf16.enabled" || key == "fp16.enabled" ||
        key == "train_micro_batch_size_per_gpu")
      throw ConfigError("[--set] got " + key +
                        ", which is what is compared. Hint: use --stages, --recipes or --micro-batch-size.");
    values.push_back({key, text.substr(equals + 1), "--set"});
  }
  return values;
}

}  // namespace zero::cli
