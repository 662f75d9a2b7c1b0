// The GPT that `zero bench` trains: its options, and the configuration keys that --set may change. Training is in each
// measurement's file.
#pragma once
#include <zero/options.h>

#include <string>
#include <vector>

#include "models/gpt.h"
#include "tools/support/options.h"

namespace zero::cli {

struct GptChoice {
  std::string preset;                                                              // empty: none
  std::string models = "gpt-1m, gpt-10m, gpt2, gpt2-medium, gpt2-large, gpt2-xl";  // of the help text
  models::GptConfig shape;  // the values before parse() are the defaults shown in the help

  // --model, --layers, --hidden, --heads, --sequence, --vocabulary. Must outlive command.parse().
  void declare(Command& command);
  // After parse(): the shape. Options given with a preset override the preset's values. Throws ConfigError.
  models::GptConfig chosen(const Command& command) const;
};

// Initializes from `seed`. Safe if ranks are threads, which share libtorch's random number generator.
models::Gpt make_gpt(const models::GptConfig& config, std::int64_t seed);

// The texts KEY=VALUE of --set. Throws ConfigError for another form, and for keys that stage, recipe or micro-batch
// size determine.
std::vector<Setting> settings_of(const std::vector<std::string>& texts);

}  // namespace zero::cli
