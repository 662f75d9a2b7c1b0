// Profiles as JSON (zero/plan.h): one flat object, every number with its unit in the name.
#include <zero/config_tools.h>
#include <zero/errors.h>
#include <zero/plan.h>

#include <nlohmann/json.hpp>

#include "base/check.h"

namespace zero {
namespace {

constexpr const char* kSchema = "zero.profile/1";

struct Field {
  const char* name;
  double& (*value)(PlanProfile&);
};
constexpr Field kFields[] = {
    {"fp32_flops_per_s", [](PlanProfile& p) -> double& { return p.fp32.flops; }},
    {"fp32_elements_per_s", [](PlanProfile& p) -> double& { return p.fp32.elements; }},
    {"fp32_heads_per_s", [](PlanProfile& p) -> double& { return p.fp32.heads; }},
    {"fp32_layer_s", [](PlanProfile& p) -> double& { return p.fp32.layer_s; }},
    {"bf16_flops_per_s", [](PlanProfile& p) -> double& { return p.bf16.flops; }},
    {"bf16_elements_per_s", [](PlanProfile& p) -> double& { return p.bf16.elements; }},
    {"bf16_heads_per_s", [](PlanProfile& p) -> double& { return p.bf16.heads; }},
    {"bf16_layer_s", [](PlanProfile& p) -> double& { return p.bf16.layer_s; }},
    {"fp16_flops_per_s", [](PlanProfile& p) -> double& { return p.fp16.flops; }},
    {"fp16_elements_per_s", [](PlanProfile& p) -> double& { return p.fp16.elements; }},
    {"fp16_heads_per_s", [](PlanProfile& p) -> double& { return p.fp16.heads; }},
    {"fp16_layer_s", [](PlanProfile& p) -> double& { return p.fp16.layer_s; }},
    {"link_bytes_per_s", [](PlanProfile& p) -> double& { return p.link_bytes; }},
    {"network_bytes_per_s", [](PlanProfile& p) -> double& { return p.network_bytes; }},
    {"collective_s", [](PlanProfile& p) -> double& { return p.collective_s; }},
    {"host_link_bytes_per_s", [](PlanProfile& p) -> double& { return p.host_link_bytes; }},
    {"device_update_elements_per_s", [](PlanProfile& p) -> double& { return p.device_update_elements; }},
    {"host_update_elements_per_s", [](PlanProfile& p) -> double& { return p.host_update_elements; }},
    {"read_bytes_per_s", [](PlanProfile& p) -> double& { return p.read_bytes; }},
    {"write_bytes_per_s", [](PlanProfile& p) -> double& { return p.write_bytes; }},
    {"step_s", [](PlanProfile& p) -> double& { return p.step_s; }},
};

}  // namespace

PlanProfile PlanProfile::from_json(std::string_view text, std::string_view name) {
  const auto fail = [&](const std::string& what) -> ConfigError {
    return ConfigError(
        base::join("[profile] ", std::string(name), ": ", what, ". Hint: `zero bench profile --out FILE` writes one."));
  };
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false, /*ignore_comments=*/true);
  if (!json.is_object() || json.value("schema", "") != kSchema)
    throw fail(base::join("got no object with \"schema\": \"", kSchema, "\", expected a profile"));
  PlanProfile profile;
  profile.name = json.value("name", std::string(name));
  std::vector<std::string> names{"schema", "name", "machine", "ranks"};
  const auto ranks = json.value("ranks", nlohmann::json(0));
  if (!ranks.is_number_integer() || ranks < 0 || ranks > 1 << 20)
    throw fail(base::join("got ", ranks.dump().substr(0, 40), " for ranks, expected a whole number of at least 0"));
  profile.ranks = ranks.get<int>();
  for (const auto& field : kFields) names.emplace_back(field.name);
  for (const auto& [key, value] : json.items()) {
    bool known = key == "schema" || key == "name" || key == "machine" || key == "ranks";
    for (const auto& field : kFields) {
      if (key != field.name) continue;
      known = true;
      if (!value.is_number() || !(value.get<double>() >= 0))
        throw fail(base::join("got ", value.dump().substr(0, 40), " for ", key, ", expected a number of at least 0"));
      field.value(profile) = value.get<double>();
    }
    const auto near = nearest_name(key, names);
    if (!known)
      throw fail(base::join("got an unknown key \"", key.substr(0, 80), "\", expected those of docs/planner.md",
                            near.empty() ? "" : "; did you mean \"" + near + "\"?"));
  }
  return profile;
}

std::string PlanProfile::json() const {
  nlohmann::ordered_json json = {{"schema", kSchema}, {"name", name}, {"ranks", ranks}};
  auto copy = *this;
  for (const auto& field : kFields) json[field.name] = field.value(copy);
  return json.dump(2) + "\n";
}

}  // namespace zero
