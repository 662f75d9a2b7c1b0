// The flags for experts of the built-in GPT, for every command that knows them: short for keys of
// libzero.model.experts.
#pragma once
#include <cstdint>
#include <vector>

#include <zero/options.h>

#include "tools/support/options.h"

namespace zero::cli {

struct ExpertArguments {
  bool moe = false;
  std::int64_t num_experts = 0, ep_world_size = 1, top_k = 1;
  double aux_loss = 0;
};

void declare_experts(Command& command, ExpertArguments& arguments);
// Throws ConfigError if a flag is given without --moe.
std::vector<Setting> expert_settings(const Command& command, const ExpertArguments& arguments);
// Throws ConfigError if --moe is given and `options`, with these settings, have no experts.
void require_experts(const ExpertArguments& arguments, const Options& options);

}  // namespace zero::cli
