// See deepspeed_stage0.h.
#include "interchange/deepspeed_stage0.h"

#include <algorithm>
#include <optional>

#include "base/check.h"

namespace zero::interchange {
namespace {

using Shape = std::vector<std::int64_t>;

// A state of the optimizer, by its number.
struct Numbered {
  std::size_t group = 0;
  std::map<std::string, StoredTensor> slots;
  std::optional<StoredTensor> master;
};

// In the order of groups. Empty: there are none, or what they belong to is not said.
std::vector<Numbered> numbered_states(const TorchArchive& archive, const PickleView& optimizer, Stage0Plan& plan) {
  const bool wrapped = optimizer.has("optimizer_state_dict");
  const auto states = wrapped ? optimizer.at("optimizer_state_dict") : optimizer;
  if (!states.is_dict() || !states.has("state") || !states.has("param_groups")) return {};
  std::map<std::string, PickleView> by_number;
  for (const auto& [key, value] : states.at("state").entries()) by_number.emplace(key, value);
  std::vector<std::vector<PickleView>> masters;
  if (wrapped && optimizer.has("fp32_groups"))
    for (const auto& group : optimizer.at("fp32_groups").items()) masters.push_back(group.items());
  std::vector<Numbered> all;
  const auto groups = states.at("param_groups").items();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto numbers = groups[g].at("params").items();
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const auto found = by_number.find(std::to_string(numbers[i].count()));
      if (found == by_number.end()) return {};
      Numbered one;
      one.group = g;
      for (const auto& [name, value] : found->second.entries()) {
        auto stored = archive.tensor(value);
        if (!stored) continue;
        if (name == "step")
          plan.steps.push_back(*std::move(stored));
        else
          one.slots.emplace(name, *std::move(stored));
      }
      if (wrapped) {
        if (g >= masters.size() || i >= masters[g].size()) return {};
        one.master = archive.require_tensor(masters[g][i]);
      }
      if (one.slots.empty()) return {};
      all.push_back(std::move(one));
    }
  }
  return all;
}

}  // namespace

Stage0Plan plan_stage0(const TorchArchive& archive, const std::set<std::string>& buffers) {
  Stage0Plan plan;
  const auto root = archive.root();
  std::vector<std::pair<std::string, StoredTensor>> model;
  TiedNames tied;
  for (const auto& [name, value] : root.at("module").entries()) {
    auto stored = archive.tensor(value);
    if (!stored || buffers.contains(name)) continue;
    if (const auto* twin = tied.put(name, *stored))
      plan.ties[name] = *twin;
    else
      model.emplace_back(name, *std::move(stored));
  }

  std::vector<Numbered> states;
  if (root.has("optimizer") && root.at("optimizer").is_dict())
    states = numbered_states(archive, root.at("optimizer"), plan);
  // By shape: names in the order of the model, and states in the order of the optimizer.
  std::map<Shape, std::vector<const std::string*>> names;
  std::map<Shape, std::vector<const Numbered*>> numbered;
  for (const auto& [name, stored] : model) names[stored.shape].push_back(&name);
  for (const auto& state : states) numbered[state.slots.begin()->second.shape].push_back(&state);
  std::map<std::string, const Numbered*> state_of;
  bool sure = !states.empty();
  for (const auto& [shape, list] : numbered) {
    sure = sure && names.contains(shape) && names.at(shape).size() == list.size();
    for (std::size_t i = 0; sure && i < list.size(); ++i) {
      sure = list[i]->group == list[0]->group && (!list[i]->master || list[i]->master->shape == shape);
      for (const auto& [slot, stored] : list[i]->slots) sure = sure && stored.shape == shape;
      state_of[*names.at(shape)[i]] = list[i];
    }
  }
  for (const auto& [name, stored] : model) {
    const auto found = state_of.find(name);
    sure = sure && (found == state_of.end() || found->second->master || stored.dtype == "F32");
  }
  if (!sure) {
    plan.steps.clear();
    plan.remarks.push_back(
        "the states of the optimizer are not taken: stage 0 stores them by number, and their shapes do not say which "
        "parameter each belongs to");
  }
  for (auto& [name, stored] : model) {
    const auto found = state_of.find(name);
    if (!sure || found == state_of.end()) {
      plan.tensors.push_back({sure ? "param" : "weight", name, stored});
      continue;
    }
    const auto& state = *found->second;
    plan.tensors.push_back({"master", name, state.master ? *state.master : stored});
    for (const auto& [slot, value] : state.slots) plan.tensors.push_back({"opt." + slot, name, value});
  }
  return plan;
}

}  // namespace zero::interchange
