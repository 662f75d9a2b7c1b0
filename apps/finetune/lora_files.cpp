// See lora_files.h. The keys are those of PEFT 0.21.
#include "apps/finetune/lora_files.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include <zero/errors.h>

#include "base/printable.h"

namespace zero::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kMostBytes = std::size_t{1} << 20;
constexpr int kMostDepth = 8;

[[noreturn]] void fail_damaged(const std::string& path, const std::string& what) {
  throw IoError(base::printable("[--lora-from] " + path + ": " + what), ExitCode::kCheckpoint);
}

std::string text_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fail_damaged(path, "cannot be read, expected the adapter_config.json that PEFT writes");
  std::string text(kMostBytes + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(in.gcount()));
  if (text.size() > kMostBytes) fail_damaged(path, "is longer than 1 MiB");
  return text;
}

Json parsed(const std::string& path) {
  const auto text = text_of(path);
  bool deep = false;
  const Json json = Json::parse(
      text,
      [&](int depth, Json::parse_event_t, Json&) {
        deep = deep || depth > kMostDepth;
        return depth <= kMostDepth;
      },
      false);
  if (deep || !json.is_object()) fail_damaged(path, "is no JSON object, or is nested too deeply");
  return json;
}

// Whether a value is null, false, zero or empty.
bool is_nothing(const Json& value) {
  return value.is_null() || value == false || value == "none" ||
         ((value.is_array() || value.is_object()) && value.empty());
}

// Keys that are read here, and those that change nothing in a forward of A and B.
bool is_known(const std::string& key) {
  static const std::set<std::string> known{"peft_type",
                                           "task_type",
                                           "r",
                                           "lora_alpha",
                                           "lora_dropout",
                                           "target_modules",
                                           "fan_in_fan_out",
                                           "inference_mode",
                                           "revision",
                                           "modules_to_save",
                                           "init_lora_weights",
                                           "eva_config",
                                           "auto_mapping",
                                           "peft_version",
                                           "megatron_core",
                                           "qalora_group_size",
                                           "runtime_config",
                                           "ensure_weight_tying",
                                           "base_model_name_or_path"};
  return known.contains(key);
}

}  // namespace

void read_adapter_config(LoraPlan& plan) {
  const auto path = (std::filesystem::path(plan.from) / kAdapterConfig).string();
  const Json json = parsed(path);
  std::string faults;
  const auto refuse = [&](const std::string& key, const Json& value, const std::string& expected) {
    faults += "\n  " + key + ": got " + value.dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 200) +
              ", expected " + expected;
  };
  if (json.value("peft_type", Json()) != "LORA") refuse("peft_type", json.value("peft_type", Json()), "\"LORA\"");
  for (const auto& [key, value] : json.items())
    if (!is_known(key) && !is_nothing(value)) refuse(key, value, "none: it is not built");
  // Other ways to begin (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change the base's weights, too, so that adapters alone
  // are not what was trained.
  const auto init = json.value("init_lora_weights", Json(true));
  if (!init.is_null() && !init.is_boolean() && init != "gaussian" && init != "orthogonal" && init != "eva")
    refuse("init_lora_weights", init, "true, false, \"gaussian\", \"orthogonal\" or \"eva\"");
  const auto rank = json.value("r", Json());
  if (!rank.is_number_integer() || rank < 1 || rank > 65536) refuse("r", rank, "a whole number from 1 to 65536");
  const auto alpha = json.value("lora_alpha", Json());
  if (!alpha.is_number() || alpha <= 0) refuse("lora_alpha", alpha, "a number above 0");
  const auto dropout = json.value("lora_dropout", Json(0.0));
  if (!dropout.is_number() || dropout < 0 || dropout >= 1) refuse("lora_dropout", dropout, "a number from 0 up to 1");
  const auto targets = json.value("target_modules", Json());
  plan.targets.clear();
  if (targets.is_array() && !targets.empty()) {
    for (const auto& name : targets)
      if (name.is_string())
        plan.targets.push_back(name.get<std::string>());
      else
        refuse("target_modules", targets, "a list of names");
  } else {
    refuse("target_modules", targets, "a list of names. Hint: write out what a pattern or all-linear stands for");
  }
  if (!faults.empty()) throw ConfigError(base::printable("[--lora-from] " + path + " cannot be used:") + faults);
  plan.rank = rank.get<std::int64_t>();
  plan.alpha = alpha.get<double>();
  plan.dropout = dropout.get<double>();
}

std::string adapter_config(const LoraPlan& plan, const AdapterFacts& facts) {
  Json json;
  json["peft_type"] = "LORA";
  json["task_type"] = facts.task_type.empty() ? Json() : Json(facts.task_type);
  json["base_model_name_or_path"] = facts.base_model;
  json["inference_mode"] = true;
  json["r"] = plan.rank;
  const auto whole = static_cast<std::int64_t>(plan.alpha);
  json["lora_alpha"] = static_cast<double>(whole) == plan.alpha ? Json(whole) : Json(plan.alpha);
  json["lora_dropout"] = plan.dropout;
  json["target_modules"] = facts.targets;
  json["modules_to_save"] = facts.whole.empty() ? Json() : Json(facts.whole);
  json["fan_in_fan_out"] = facts.transposed;
  json["bias"] = "none";
  json["init_lora_weights"] = true;
  json["use_rslora"] = false;
  json["use_dora"] = false;
  return json.dump(2) + "\n";
}

}  // namespace zero::cli
