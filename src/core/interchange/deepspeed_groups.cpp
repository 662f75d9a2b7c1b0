// See deepspeed_groups.h.
#include "interchange/deepspeed_groups.h"

namespace zero::interchange {
namespace {

void add_number(const PickleView& value, std::set<double>& out) {
  const auto& node = value.node();
  if (node.is(pickle::Kind::Float)) out.insert(node.number);
  if (node.is(pickle::Kind::Integer)) out.insert(static_cast<double>(node.integer));
}

bool is_list(const PickleView& value) {
  return value.node().is(pickle::Kind::List) || value.node().is(pickle::Kind::Tuple);
}

}  // namespace

SourceSettings read_deepspeed_settings(const PickleView& states) {
  SourceSettings settings;
  if (!states.is_dict()) return settings;
  if (!states.has("param_groups")) {
    for (const char* const inner : {"base_optimizer_state", "optimizer_state_dict"})
      if (settings.empty() && states.has(inner)) settings = read_deepspeed_settings(states.at(inner));
    return settings;
  }
  const auto groups = states.at("param_groups");
  if (!is_list(groups)) return settings;
  for (const auto& group : groups.items()) {
    if (!group.is_dict()) continue;
    if (const char* const rate = group.has("initial_lr") ? "initial_lr" : "lr"; group.has(rate))
      add_number(group.at(rate), settings["lr"]);
    for (const char* const name : {"eps", "weight_decay"})
      if (group.has(name)) add_number(group.at(name), settings[name]);
    if (!group.has("betas") || !is_list(group.at("betas"))) continue;
    const auto betas = group.at("betas").items();
    for (std::size_t i = 0; i < betas.size() && i < 2; ++i) add_number(betas[i], settings[i == 0 ? "beta1" : "beta2"]);
  }
  std::erase_if(settings, [](const auto& entry) { return entry.second.empty(); });
  return settings;
}

}  // namespace zero::interchange
