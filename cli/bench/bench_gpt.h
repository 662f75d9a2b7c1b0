// The GPT that `zero bench` trains: its options, and the configuration keys that may be set beside
// what a measurement compares. How a measurement trains it is in that measurement's file.
#pragma once
#include <zero/options.h>

#include <string>
#include <vector>

#include "cli/support/options.h"
#include "models/gpt.h"

namespace zero::cli {

struct GptChoice {
  std::string preset;       // empty: none
  models::GptConfig shape;  // its values before parse() are the defaults the help shows

  // --model, --layers, --hidden, --heads, --sequence, --vocabulary. Must outlive command.parse().
  void declare(Command& command);
  // After parse(): the shape, of which options given beside a preset change the preset's. Throws ConfigError.
  models::GptConfig chosen(const Command& command) const;
};

// Initial values from `seed`; safe where ranks are threads, which share libtorch's generator.
models::Gpt make_gpt(const models::GptConfig& config, std::int64_t seed);

// The texts KEY=VALUE of --set. Throws ConfigError for another form and for the keys that stages,
// recipes and the micro-batch size decide.
std::vector<Setting> settings_of(const std::vector<std::string>& texts);

}  // namespace zero::cli
