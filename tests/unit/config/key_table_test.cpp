// The table of keys: each has a field, a default, a condition and a row in the schema and in docs/configuration.md.
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include <zero/config_tools.h>
#include <zero/errors.h>

#include "config/document.h"
#include "config/json_reader.h"

namespace zero::key_table_test {
namespace {

using config::keys;

config::Value value_of(const std::string& json) {
  config::Faults faults;
  return *config::read_json(std::make_shared<config::Source>(config::Source{"", json}), faults);
}

// A value of the key that is not its default.
std::string other_value(const config::Key& key) {
  const auto number = [&](double more) { return config::number_text(key.low + more); };
  std::vector<std::string> values;
  switch (key.type) {
    case config::Type::Bool:
      values = {"true", "false"};
      break;
    case config::Type::Int:
    case config::Type::Bytes:
      values = {number(2.0 * static_cast<double>(key.multiple)), number(3.0 * static_cast<double>(key.multiple))};
      break;
    case config::Type::Num:
    case config::Type::NumOrList:
      values = {number(0.5)};
      break;
    case config::Type::NumPair:
      values = {"[0.5, 0.25]"};
      break;
    case config::Type::Enum:
      values = {"\"" + key.choices.front() + "\"", "\"" + key.choices.back() + "\""};
      break;
    case config::Type::Text:
      values = {"\"/x\""};
      break;
    case config::Type::TextList:
      values = {"[\"x\", \"y\"]"};
      break;
    case config::Type::Groups:
      values = {R"([{"pattern": "x", "lr": 0.5}])"};
      break;
    case config::Type::Any:
    case config::Type::Block:
      break;
  }
  for (const auto& value : values)
    if (value != key.default_json) return value;
  return {};
}

// A key sets its field, which has what was set, and no other key's field; null empties it.
TEST(KeyTable, EveryWorkingKeyHasAFieldOfItsOwn) {
  int fields = 0;
  for (const auto& key : keys()) {
    SCOPED_TRACE(key.path);
    EXPECT_EQ(key.read != nullptr, key.effect == config::Effect::Works);
    if (!key.read || key.type == config::Type::Block) continue;
    const auto text = other_value(key);
    ASSERT_FALSE(text.empty());
    config::Settings settings;
    key.read(value_of(text), settings);
    EXPECT_EQ(key.json(settings), text);
    for (const auto& other : keys())
      if (other.json && other.path != key.path) EXPECT_EQ(other.json(settings), other.default_json) << other.path;
    if (key.nullable()) {
      key.read(value_of("null"), settings);
      EXPECT_EQ(key.json(settings), "null");
    }
    ++fields;
  }
  EXPECT_GE(fields, 170);
}

TEST(KeyTable, SettingsOfNoKeyAreTheInitialValues) {
  const Options options;
  for (const auto& key : keys())
    if (key.json) EXPECT_EQ(key.json(options.settings()), key.default_json) << key.path;
}

TEST(KeyTable, AnUnknownPathIsNotRead) {
  EXPECT_EQ(config::find_key("seeds"), nullptr);
  EXPECT_THROW(config::key_at("seeds"), InternalError);
}

// Of each condition: what a notice says where it is not met, and a configuration that meets it.
TEST(KeyTable, KeysWhoseConditionIsNotMetSayWhy) {
  using config::When;
  struct Row {
    When when;
    const char *reason, *met;
  };
  const auto zero = [](const char* keys) { return "{\"zero_optimization\": {" + std::string(keys) + "}}"; };
  const std::string stage3 = zero(R"("stage": 3)"), stage2 = zero(R"("stage": 2)");
  const std::string host = zero(R"("stage": 1, "offload_optimizer": {"device": "cpu"})");
  const std::string file = zero(R"("stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"})");
  const std::string params = zero(R"("stage": 3, "offload_param": {"device": "cpu"})");
  const std::string params_file = zero(R"("stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"})");
  const Row rows[] = {
      {When::StagesFrom1, "it applies to stages 1 to 3; stage is 0", stage2.c_str()},
      {When::Stages1And2, "it applies to stages 1 and 2; stage is 0", stage2.c_str()},
      {When::Stage3, "it applies to stage 3; stage is 0", stage3.c_str()},
      {When::TensorParallel, "tensor_parallel.autotp_size is not above 1",
       R"({"tensor_parallel": {"autotp_size": 2}})"},
      {When::Experts, "num_experts is 0", R"({"libzero": {"model": {"experts": {"num_experts": 4}}}})"},
      {When::OptimizerOffloaded, "offload_optimizer.device is none", host.c_str()},
      {When::OptimizerInFile, "offload_optimizer.device is not nvme", file.c_str()},
      {When::ParamsOffloaded, "offload_param.device is none", params.c_str()},
      {When::ParamsInFile, "offload_param.device is not nvme", params_file.c_str()},
      {When::ActivationsOffloaded, "activation_offload.device is none",
       R"({"libzero": {"activation_offload": {"device": "cpu"}}})"},
      {When::ActivationsInFile, "activation_offload.device is not nvme",
       R"({"libzero": {"activation_offload": {"device": "nvme", "nvme_path": "/x"}}})"},
      {When::AnyFile, "no device is nvme", R"({"libzero": {"activation_file_path": "/x"}})"},
      {When::Fp16, "fp16 is not enabled", R"({"fp16": {"enabled": true}})"},
      {When::DynamicScale, "fp16 is not enabled", R"({"fp16": {"enabled": true}})"},
      {When::Bf16, "bf16 is not enabled", R"({"bf16": {"enabled": true}})"},
      {When::TensorBoard, "tensorboard is off", R"({"tensorboard": {"enabled": true}})"},
      {When::CsvMonitor, "csv_monitor is off", R"({"csv_monitor": {"enabled": true}})"},
  };
  const auto notices = [](const char* text, const config::Key& key, const std::string& value) {
    std::string all;
    for (const auto& notice : Options::from_json(text, "x", {{key.path, value}}).notices()) all += notice + "\n";
    return all;
  };
  int checked = 0;
  for (const auto& row : rows)
    for (const auto& key : keys()) {
      if (key.when != row.when || key.effect == config::Effect::NotBuilt) continue;
      SCOPED_TRACE(key.path);
      const std::string value = key.type == config::Type::Text ? "\"/x\"" : key.default_json;
      const std::string reason = "no effect: " + std::string(row.reason);
      EXPECT_NE(notices("{}", key, value).find(reason), std::string::npos);
      EXPECT_EQ(notices(row.met, key, value).find(reason), std::string::npos);
      ++checked;
    }
  EXPECT_GE(checked, 60);
  const auto& factor = config::key_at("gradient_predivide_factor");
  EXPECT_EQ(notices("{}", factor, "2"), "");
  EXPECT_NE(notices(R"({"prescale_gradients": true})", factor, "2").find("prescale_gradients is true"),
            std::string::npos);
  EXPECT_NE(notices(R"({"gradient_allreduce_op": "sum"})", factor, "2").find("gradient_allreduce_op is sum"),
            std::string::npos);
  const auto& window = config::key_at("fp16.loss_scale_window");
  EXPECT_NE(notices(R"({"fp16": {"enabled": true, "loss_scale": 8}})", window, "5").find("the loss scale is fixed"),
            std::string::npos);
  EXPECT_EQ(notices("{}", config::key_at("managed_gradient_accumulation"), "true"), "");
}

TEST(KeyTable, DefaultsPassTheirOwnChecksAndChangeNothing) {
  const auto defaults = Options().effective();
  for (const auto& key : keys()) {
    if (key.default_json.empty() || key.type == config::Type::Block) continue;
    SCOPED_TRACE(key.path);
    // A type that owns the key, so that it is known at all.
    std::vector<Setting> settings;
    const std::string owner(key.owners.substr(0, key.owners.find(' ')));
    if (!owner.empty()) {
      const bool optimizer = key.path.starts_with("optimizer");
      settings.push_back({optimizer ? "optimizer.type" : "scheduler.type", owner});
      if (!optimizer) {
        settings.push_back({"scheduler.params.total_num_steps", "5000", "program", false});
        if (owner == "WarmupLR") settings.pop_back();
        if (owner == "OneCycle" || owner == "LRRangeTest") settings.pop_back();
        if (owner == "OneCycle") {
          settings.push_back({"scheduler.params.cycle_min_lr", "0"});
          settings.push_back({"scheduler.params.cycle_max_lr", "1"});
        }
      }
    } else if (key.path.starts_with("optimizer.")) {
      settings.push_back({"optimizer.type", "AdamW"});
    } else if (key.path.starts_with("scheduler.")) {
      settings.push_back({"scheduler.type", "WarmupLR"});
    }
    settings.push_back({key.path, key.default_json});
    const auto options = Options::from_json("{}", "x", settings);
    EXPECT_EQ(options.effective().at(key.path == "comet.api_key" ? "seed" : key.path),
              key.path == "comet.api_key" ? "1234" : options.document().effective(key));
    EXPECT_TRUE(options.document().not_built.empty());
  }
  EXPECT_EQ(defaults.at("gradient_clipping"), "1");
}

TEST(KeyTable, SchemaIsStrictAndHasEveryRow) {
  const auto schema = nlohmann::json::parse(config_schema());
  std::function<void(const nlohmann::json&)> strict = [&](const nlohmann::json& node) {
    if (node.is_object() && node.contains("properties")) {
      EXPECT_EQ(node.at("additionalProperties"), false);
      for (const auto& [name, child] : node.at("properties").items()) strict(child);
    }
    if (node.is_object() && node.contains("anyOf"))
      for (const auto& child : node.at("anyOf")) strict(child);
  };
  strict(schema);
  for (const auto& key : keys()) {
    const nlohmann::json* node = &schema;
    const std::string& path = key.path;
    for (std::size_t at = 0; at <= path.size();) {
      const auto end = std::min(path.find('.', at), path.size());
      if (!node->contains("properties") && node->contains("anyOf")) node = &node->at("anyOf").back();
      ASSERT_TRUE(node->at("properties").contains(path.substr(at, end - at))) << path;
      node = &node->at("properties").at(path.substr(at, end - at));
      at = end + 1;
    }
    EXPECT_TRUE(node->contains("x-libzero-effect")) << path;
    EXPECT_NE(config_keys(path).find(path), std::string::npos);
  }
}

TEST(KeyTable, DocumentedPageIsCurrent) {
  std::ifstream file(std::string(ZERO_SOURCE_DIR) + "/docs/configuration.md");
  std::ostringstream page;
  page << file.rdbuf();
  EXPECT_NE(page.str().find(config_keys_markdown()), std::string::npos)
      << "docs/configuration.md does not hold the output of `zero config keys --markdown`";
}

}  // namespace
}  // namespace zero::key_table_test
