// The gate of a layer with experts chooses as DeepSpeed's with the same seed. tests/golden/deepspeed_gate.json has
// DeepSpeed's choices; script/deepspeed-gate-vectors records them, and says how inputs come from a seed.
#include <gtest/gtest.h>
#include <torch/types.h>
#include <zero/moe.h>

#include <cmath>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace zero {
namespace {

using Json = nlohmann::json;

const Json& record() {
  static const Json all = Json::parse(std::ifstream(ZERO_SOURCE_DIR "/tests/golden/deepspeed_gate.json"));
  return all;
}

MoeOptions options_of(const Json& settings, std::int64_t hidden) {
  MoeOptions options;
  options.hidden_size = hidden;
  options.num_experts = settings.at("experts");
  options.k = settings.value("k", options.k);
  const bool training = settings.value("training", true);
  // The other mode's would be seen.
  (training ? options.capacity_factor : options.eval_capacity_factor) = settings.at("capacity_factor");
  (training ? options.eval_capacity_factor : options.capacity_factor) = 100;
  options.min_capacity = settings.at("min_capacity");
  options.noisy_gate_policy = settings.value("noisy_gate_policy", options.noisy_gate_policy);
  options.drop_tokens = settings.value("drop_tokens", options.drop_tokens);
  options.use_rts = settings.value("use_rts", options.use_rts);
  options.top2_2nd_expert_sampling = settings.value("top2_2nd_expert_sampling", options.top2_2nd_expert_sampling);
  options.drop_policy = settings.value("drop_policy", options.drop_policy);
  return options;
}

std::string name_of(const Json& settings) {
  auto words = settings;
  for (const char* result : {"counts", "l_aux", "kept"}) words.erase(result);
  return words.dump();
}

// The token of each row, whose values are a copy of the token's.
std::int64_t token_of(const at::Tensor& x, const at::Tensor& row) {
  const auto found = x.eq(row).all(1).nonzero();
  EXPECT_EQ(found.numel(), 1);
  return found[0].item<std::int64_t>();
}

TEST(DeepSpeedGate, MakesTheSameChoices) {
  ASSERT_EQ(record().at("deepspeed"), "0.19.8");
  const std::int64_t hidden = record().at("hidden");
  std::int64_t cases = 0, kept_choices = 0, dropped_tokens = 0;
  for (const auto& settings : record().at("cases")) {
    SCOPED_TRACE(name_of(settings));
    const auto options = options_of(settings, hidden);
    const std::int64_t tokens = settings.at("tokens"), experts = options.num_experts;
    const auto seed = settings.at("seed").get<std::uint64_t>();
    torch::manual_seed(seed);
    const auto x = 2 * at::rand({tokens, hidden}) - 1;
    const auto wg = 2 * at::rand({experts, hidden}) - 1;
    const auto used = settings.contains("used_token") ? at::rand({tokens}).lt(0.75).to(at::kLong) : at::Tensor();

    // Expert c answers with a one in place c of every row, so that the output has the weights.
    std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> slots;  // by token and expert
    torch::manual_seed(seed + 1000);
    const auto result = mix_experts(
        x, wg, options, settings.value("training", true), nullptr,
        [&](std::int64_t c, const at::Tensor& rows) {
          for (std::int64_t slot = 0; slot < rows.size(0); ++slot) slots[{token_of(x, rows[slot]), c}] = slot;
          auto out = at::zeros_like(rows);
          out.select(1, c).fill_(1);
          return out;
        },
        used);

    EXPECT_NEAR(result.l_aux.item<double>(), settings.at("l_aux").get<double>(), 1e-6);
    const auto& counts = settings.at("counts");
    std::int64_t kept = 0;
    for (std::int64_t e = 0; e < experts; ++e)
      EXPECT_EQ(result.exp_counts[e].item<std::int64_t>(), counts.at(static_cast<std::size_t>(e))) << "expert " << e;
    for (std::int64_t s = 0; s < tokens; ++s) {
      const auto& of_token = settings.at("kept").at(static_cast<std::size_t>(s));
      dropped_tokens += of_token.empty() ? 1 : 0;
      auto weights = at::zeros({experts}, at::kDouble);
      for (const auto& choice : of_token) {
        const std::int64_t expert = choice.at(0);
        const auto slot = slots.find({s, expert});
        ASSERT_TRUE(slot != slots.end()) << "token " << s << " is not kept by expert " << expert;
        EXPECT_EQ(slot->second, choice.at(1)) << "token " << s << ", expert " << expert;
        weights[expert] = choice.at(2).get<double>();
        ++kept;
      }
      const auto got = result.output[s].narrow(0, 0, experts).to(at::kDouble);
      EXPECT_LT((got - weights).abs().max().item<double>(), 1e-6) << "token " << s << ": " << got;
    }
    EXPECT_EQ(result.kept, kept);
    EXPECT_EQ(static_cast<std::int64_t>(slots.size()), kept) << "other choices were kept as well";
    ++cases;
    kept_choices += kept;
  }
  // The file is whole.
  EXPECT_GE(cases, 50);
  EXPECT_GE(kept_choices, 1000);
  EXPECT_GE(dropped_tokens, 100);
}

}  // namespace
}  // namespace zero
