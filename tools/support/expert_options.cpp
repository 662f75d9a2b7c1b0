#include "tools/support/expert_options.h"

#include <string>

#include <zero/errors.h>

#include "config/json_value.h"
#include "config/settings.h"

namespace zero::cli {

void declare_experts(Command& c, ExpertArguments& a) {
  c.flag("--moe", a.moe, "experts in place of the MLP of every second block");
  c.option("--num-experts", a.num_experts, "E", "with --moe: experts of a block", 1, 65536);
  c.option("--ep-world-size", a.ep_world_size, "EP", "with --moe: ranks that share the experts of a block (1)", 1,
           65536);
  c.option("--top-k", a.top_k, "K", "with --moe: experts of a token (1)", 1, 65536);
  c.option("--aux-loss", a.aux_loss, "X", "with --moe: factor of the auxiliary losses (0.01)", 0, 1e6);
}

std::vector<Setting> expert_settings(const Command& c, const ExpertArguments& a) {
  std::vector<Setting> all;
  const auto add = [&](const char* flag, const char* key, const std::string& value) {
    if (!c.given(flag)) return;
    if (!a.moe)
      throw ConfigError(std::string("[") + flag + "] got " + value +
                        " without --moe, expected both. Hint: --moe gives every second block experts.");
    all.push_back({std::string("libzero.model.experts.") + key, value, std::string("CLI ") + flag, false});
  };
  add("--num-experts", "num_experts", std::to_string(a.num_experts));
  add("--ep-world-size", "ep_size", std::to_string(a.ep_world_size));
  add("--top-k", "k", std::to_string(a.top_k));
  add("--aux-loss", "aux_loss", config::number_text(a.aux_loss));
  return all;
}

void require_experts(const ExpertArguments& a, const Options& options) {
  if (a.moe && options.settings().model.experts.num_experts == 0)
    throw ConfigError(
        "[--moe] got no --num-experts, expected how many experts a block has. Hint: --num-experts 8, or "
        "libzero.model.experts.num_experts in the configuration.");
}

}  // namespace zero::cli
