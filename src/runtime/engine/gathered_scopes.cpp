// Resolves names, patterns and modules to groups. See gathered_scopes.h.
#include "engine/gathered_scopes.h"

#include <torch/nn/module.h>
#include <zero/config_tools.h>
#include <zero/errors.h>

#include <algorithm>
#include <set>
#include <unordered_set>

#include "base/name_pattern.h"

namespace zero::engine {
namespace {

using Groups = std::vector<std::unique_ptr<ModelBinding::Group>>;

// An expert is named on all ranks: those without it gather what they have in its place.
bool names_member(const std::string& pattern, const ModelParameter& member) {
  if (base::pattern_names(pattern, member.name, member.aliases)) return true;
  for (int place = 0; member.expert && place < member.expert->ep_size; ++place)
    if (base::pattern_names(pattern, member.expert->at(place, member.name), {})) return true;
  return false;
}

std::set<int> groups_named(const Groups& groups, const std::string& pattern) {
  std::set<int> found;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& members = groups[g]->members;
    if (base::pattern_names(pattern, groups[g]->facts.name, {}) ||
        std::any_of(members.begin(), members.end(),
                    [&](const ModelParameter& member) { return names_member(pattern, member); }))
      found.insert(static_cast<int>(g));
  }
  return found;
}

std::string nearest(const Groups& groups, const std::string& name) {
  std::vector<std::string> known;
  for (const auto& group : groups) {
    known.push_back(group->facts.name);
    for (const auto& member : group->members) known.push_back(member.name);
  }
  return nearest_name(name, known);
}

std::set<int> groups_of_module(const Groups& groups, const std::vector<ModelParameter>& remote,
                               const torch::nn::Module& module) {
  std::unordered_set<const c10::TensorImpl*> wanted;
  for (const auto& parameter : module.parameters()) wanted.insert(parameter.unsafeGetTensorImpl());
  std::set<int> found;
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (const auto& member : groups[g]->members)
      if (wanted.count(member.tensor.unsafeGetTensorImpl()) != 0) found.insert(static_cast<int>(g));
  for (const auto& parameter : remote)
    if (wanted.count(parameter.tensor.unsafeGetTensorImpl()) != 0)
      found.merge(groups_named(groups, base::exact_pattern(parameter.name)));
  return found;
}

}  // namespace

std::vector<int> chosen_groups(const ModelBinding& binding, const std::vector<ModelParameter>& remote,
                               const ParameterChoice& choice, const std::string& where) {
  const auto& groups = binding.groups();
  std::set<int> chosen;
  std::string faults;
  if (choice.all)
    for (std::size_t g = 0; g < groups.size(); ++g) chosen.insert(static_cast<int>(g));
  if (choice.module != nullptr) {
    chosen = groups_of_module(groups, remote, *choice.module);
    if (chosen.empty())
      throw ConfigError(where + "got a module (" + choice.module->name() +
                        ") that has no parameter of this Engine. Hint: pass a module of the model that it holds.");
  }
  for (const auto& name : choice.names) {
    const auto found = groups_named(groups, name);
    chosen.insert(found.begin(), found.end());
    if (!found.empty()) continue;
    faults += (faults.empty() ? "\"" : "; \"") + name + "\"";
    if (const auto near = nearest(groups, name); !near.empty()) faults += " (did you mean \"" + near + "\"?)";
  }
  if (!faults.empty())
    throw ConfigError(where + "got names that match no parameter and no unit: " + faults +
                      ". Hint: names are those of model->named_parameters() and engine.units(); * and ? are patterns, "
                      "\"layers.0.*\" all that is in layers.0.");
  return {chosen.begin(), chosen.end()};
}

}  // namespace zero::engine
