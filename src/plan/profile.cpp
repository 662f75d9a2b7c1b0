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
  double PlanProfile::*value;
};
constexpr Field kFields[] = {
    {"fp32_flops_per_s", &PlanProfile::fp32_flops},
    {"bf16_flops_per_s", &PlanProfile::bf16_flops},
    {"fp16_flops_per_s", &PlanProfile::fp16_flops},
    {"memory_bytes_per_s", &PlanProfile::memory_bytes},
    {"link_bytes_per_s", &PlanProfile::link_bytes},
    {"network_bytes_per_s", &PlanProfile::network_bytes},
    {"collective_latency_s", &PlanProfile::collective_latency_s},
    {"host_link_bytes_per_s", &PlanProfile::host_link_bytes},
    {"device_update_elements_per_s", &PlanProfile::device_update_elements},
    {"host_update_elements_per_s", &PlanProfile::host_update_elements},
    {"read_bytes_per_s", &PlanProfile::read_bytes},
    {"write_bytes_per_s", &PlanProfile::write_bytes},
    {"step_overhead_s", &PlanProfile::step_overhead_s},
};

}  // namespace

PlanProfile PlanProfile::from_json(std::string_view text, std::string_view name) {
  const auto fail = [&](const std::string& what) -> ConfigError {
    return ConfigError(base::join("[profile] ", std::string(name), ": ", what, ". Hint: `zero bench profile --out FILE` writes one."));
  };
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false, /*ignore_comments=*/true);
  if (!json.is_object() || json.value("schema", "") != kSchema)
    throw fail(base::join("got no object with \"schema\": \"", kSchema, "\", expected a profile"));
  PlanProfile profile;
  profile.name = json.value("name", std::string(name));
  std::vector<std::string> names{"schema", "name", "machine"};
  for (const auto& field : kFields) names.emplace_back(field.name);
  for (const auto& [key, value] : json.items()) {
    bool known = key == "schema" || key == "name" || key == "machine";
    for (const auto& field : kFields) {
      if (key != field.name) continue;
      known = true;
      if (!value.is_number() || !(value.get<double>() >= 0))
        throw fail(base::join("got ", value.dump().substr(0, 40), " for ", key, ", expected a number of at least 0"));
      profile.*field.value = value.get<double>();
    }
    const auto near = nearest_name(key, names);
    if (!known)
      throw fail(base::join("got an unknown key \"", key.substr(0, 80), "\", expected those of docs/planner.md",
                            near.empty() ? "" : "; did you mean \"" + near + "\"?"));
  }
  return profile;
}

std::string PlanProfile::json() const {
  nlohmann::ordered_json json = {{"schema", kSchema}, {"name", name}};
  for (const auto& field : kFields) json[field.name] = this->*field.value;
  return json.dump(2) + "\n";
}

}  // namespace zero
