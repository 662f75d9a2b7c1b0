#include "tools/support/gpt_experts.h"

#include <zero/errors.h>

#include "base/check.h"

namespace zero::cli {
namespace {

MoeOptions moe_options(const config::ExpertSettings& experts, std::int64_t hidden) {
  MoeOptions options;
  options.hidden_size = hidden;
  options.num_experts = experts.num_experts;
  options.ep_size = experts.ep_size;
  options.k = experts.k;
  options.capacity_factor = experts.capacity_factor;
  options.eval_capacity_factor = experts.eval_capacity_factor;
  options.min_capacity = experts.min_capacity;
  options.use_residual = experts.use_residual;
  options.noisy_gate_policy = experts.noisy_gate_policy;
  options.drop_tokens = experts.drop_tokens;
  options.use_rts = experts.use_rts;
  options.top2_2nd_expert_sampling = experts.top2_2nd_expert_sampling;
  return options;
}

}  // namespace

void add_experts(models::GptConfig& model, const config::ExpertSettings& experts) {
  if (experts.num_experts == 0) return;
  if (experts.expert_interval > model.layers)
    throw ConfigError(base::join("[libzero.model.experts.expert_interval] got ", experts.expert_interval,
                                 ", expected at most ", model.layers,
                                 ", the layers of the model. Hint: 1 gives every "
                                 "layer experts."));
  model.mlp = [experts](const models::GptConfig& config, std::int64_t layer) {
    if ((layer + 1) % experts.expert_interval != 0) return torch::nn::AnyModule();
    const auto make = [&config](std::int64_t) { return torch::nn::AnyModule(models::GptMlp(config)); };
    return torch::nn::AnyModule(MoE(moe_options(experts, config.hidden), make));
  };
}

ExpertCounter::ExpertCounter(const models::Gpt& model) {
  for (const auto& item : model->named_modules()) {
    const auto experts = std::dynamic_pointer_cast<MoEImpl>(item.value());
    if (!experts) continue;
    // "blocks.3.mlp"
    layers_.push_back({std::stoll(item.key().substr(item.key().find('.') + 1)), experts});
    sums_.resize(sums_.size() + static_cast<std::size_t>(experts->num_experts()) + 1);
  }
}

void ExpertCounter::note() {
  auto* sum = sums_.data();
  for (const auto& layer : layers_) {
    const auto counts = layer.experts->last_counts().cpu();
    for (std::int64_t e = 0; e < layer.experts->num_experts(); ++e) *sum++ += counts.const_data_ptr<std::int64_t>()[e];
    *sum++ += layer.experts->last_kept();
  }
}

std::vector<std::int64_t> ExpertCounter::take() {
  return std::exchange(sums_, std::vector<std::int64_t>(sums_.size()));
}

report::ExpertLoad ExpertCounter::load_of(const std::vector<std::int64_t>& numbers, std::int64_t step) const {
  report::ExpertLoad load{step, step, {}};
  auto at = numbers.begin();
  for (const auto& layer : layers_) {
    const auto end = at + layer.experts->num_experts();
    load.layers.push_back({layer.block, {at, end}, *end});
    at = end + 1;
  }
  return load;
}

}  // namespace zero::cli
