// See units.h.
#include "plan/units.h"

#include <algorithm>
#include <map>

#include <zero/errors.h>

#include "base/check.h"
#include "config/optimizers.h"
#include "optim/owners.h"
#include "sharding/kept_fp32.h"
#include "sharding/unit_cut.h"
#include "step/whole_update.h"

namespace zero::planning {
namespace {

// The innermost of the named modules that contains the parameter.
std::string named_unit_of(const std::string& parameter, const std::vector<std::string>& named) {
  std::string unit;
  for (const auto& path : named)
    if (path.size() > unit.size() && parameter.compare(0, path.size() + 1, path + ".") == 0) unit = path;
  return unit;
}

// The unit rules of a configuration, read as the engine reads them.
sharding::UnitRules unit_rules(const config::Settings& settings) {
  return {.min_numel = settings.unit_min_numel,
          .max_numel = settings.zero.reduce_bucket_size,
          .persistent_numel = settings.zero.stage == 3 ? settings.zero.persistence_threshold : 0,
          .persistent_total = settings.zero.model_persistence_threshold};
}

sharding::KeptFp32 kept_fp32(const std::vector<Parameter>& parameters, const config::Settings& settings) {
  std::vector<sharding::ParameterNames> names;
  for (const auto& parameter : parameters) names.push_back({parameter.name});
  return sharding::kept_fp32(settings, names);
}

}  // namespace

std::vector<std::string> unmatched_patterns(const std::vector<Parameter>& parameters,
                                            const config::Settings& settings) {
  return kept_fp32(parameters, settings).faults;
}

bool keeps_the_same(const std::vector<Parameter>& parameters, const config::Settings& settings) {
  const auto kept = kept_fp32(parameters, settings).kept;
  std::map<std::string, bool> by_name;  // without the path of the layer
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& layer = layer_of(parameters[i]);
    if (layer.empty()) continue;
    const auto [found, added] = by_name.emplace(parameters[i].name.substr(layer.size()), kept[i]);
    if (!added && found->second != kept[i]) return false;
  }
  return true;
}

std::vector<Unit> cut_into_units(const std::vector<Parameter>& parameters, const config::Settings& settings, int world,
                                 std::int64_t width, bool gpu) {
  if (parameters.empty()) throw ConfigError("[plan] got a model without parameters, expected at least one");
  const auto fp32 = kept_fp32(parameters, settings).kept;
  const auto is_matrix = [&](const Parameter& parameter) {
    return config::is_muon_matrix(settings.optimizer, parameter.name, parameter.sizes.size(), parameter.table);
  };
  std::vector<sharding::UnitMember> members;
  for (const auto& parameter : parameters)
    // Parts may be uneven, and units must be the same on all ranks.
    members.push_back(
        {parameter.parts == 1 ? parameter.numel : (parameter.whole + parameter.parts - 1) / parameter.parts,
         settings.units.empty() || parameter.ep_size > 1 ? parameter.unit
                                                         : named_unit_of(parameter.name, settings.units),
         parameter.trainable, parameter.ep_size > 1 ? 1 : 0, fp32[members.size()],
         is_matrix(parameter) ? config::name_of(config::OptimizerType::Muon) : ""});
  for (const auto& path : settings.units)
    if (std::none_of(members.begin(), members.end(), [&](const auto& member) { return member.unit == path; }))
      throw ConfigError(
          base::join("[plan] got libzero.units \"", path, "\", expected modules of the model that have parameters"));
  std::vector<Unit> units;
  for (auto& cut : sharding::cut_units(members, unit_rules(settings))) {
    const auto first_part = std::stable_partition(cut.parameters.begin(), cut.parameters.end(),
                                                  [&](std::size_t i) { return parameters[i].parts == 1; });
    const auto replicated = static_cast<std::size_t>(first_part - cut.parameters.begin());
    const int ranks = world / parameters[cut.parameters.front()].ep_size;
    std::vector<std::int64_t> numels;
    for (const auto i : cut.parameters) numels.push_back(parameters[i].numel);
    const bool matrix = is_matrix(parameters[cut.parameters.front()]);
    auto states = config::states_of(settings.optimizer, matrix);
    units.push_back({.name = std::move(cut.name),
                     .root = cut.root,
                     .trainable = cut.trainable,
                     .module = cut.module,
                     .persistent = cut.persistent,
                     .fp32 = cut.fp32,
                     .parameters = std::move(cut.parameters),
                     .layout = sharding::ShardLayout::of_group(std::move(numels), ranks,
                                                               cut.fp32 ? step::width(step::Dtype::F32) : width, !gpu,
                                                               step::slot_block(step::slots_of(settings))),
                     .axis = cut.axis,
                     .replicated = replicated,
                     .states = std::move(states),
                     .by_rule = matrix});
  }
  for (const int axis : {0, 1}) {
    const auto of_axis = std::find_if(units.begin(), units.end(), [&](const Unit& unit) { return unit.axis == axis; });
    if (of_axis == units.end()) continue;
    step::set_owners(units, axis, of_axis->layout.world(),
                     [&](std::size_t i) { return std::optional(optim::muon_cost(parameters[i].sizes)); });
  }
  return units;
}

std::vector<bool> fp32_parameters(const std::vector<Unit>& units, std::size_t count) {
  std::vector<bool> fp32(count);
  for (const auto& unit : units)
    for (const auto i : unit.parameters) fp32[i] = unit.fp32;
  return fp32;
}

}  // namespace zero::planning
