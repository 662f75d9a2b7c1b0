// The key table as JSON Schema, as text and as Markdown.
#include <algorithm>
#include <cctype>

#include <zero/config_tools.h>

#include "base/json_write.h"
#include "config/document.h"

namespace zero {
namespace {

using base::json_quote;
using config::Effect;
using config::Key;
using config::Type;

std::string choices_json(const Key& key) {
  std::string out;
  for (const auto& choice : key.choices) out += (out.empty() ? "" : ", ") + json_quote(choice);
  if (key.nullable()) out += ", null";
  if (!key.auto_rule.empty()) out += ", \"auto\"";
  return out;
}

std::string limits_json(const Key& key) {
  std::string out;
  constexpr double kInf = std::numeric_limits<double>::infinity();
  if (key.low > -kInf)
    out +=
        std::string(", \"") + (key.above_low ? "exclusiveMinimum" : "minimum") + "\": " + config::number_text(key.low);
  if (key.high < kInf)
    out += std::string(", \"") + (key.below_high ? "exclusiveMaximum" : "maximum") +
           "\": " + config::number_text(key.high);
  if (key.multiple > 1) out += ", \"multipleOf\": " + std::to_string(key.multiple);
  return out;
}

// The alternative types of a key's value.
std::string type_json(const Key& key) {
  std::string main;
  const std::string number = "{\"type\": \"number\"" + limits_json(key) + "}";
  switch (key.type) {
    case Type::Bool:
      main = "{\"type\": \"boolean\"}";
      break;
    case Type::Int:
      main = "{\"type\": \"integer\"" + limits_json(key) + "}";
      break;
    case Type::Bytes:
      main = "{\"type\": \"integer\"" + limits_json(key) +
             "}, {\"type\": \"string\", \"pattern\": \"^ *[0-9]+([.][0-9]+)? *([kKMGTP]i?)?B? *$\"}";
      break;
    case Type::Num:
      main = number;
      break;
    case Type::Enum:
      return "\"enum\": [" + choices_json(key) + "]";
    case Type::Text:
      main = "{\"type\": \"string\"}";
      break;
    case Type::TextList:
      main = "{\"type\": \"string\"}, {\"type\": \"array\", \"items\": {\"type\": \"string\"}}";
      break;
    case Type::NumPair:
      main = "{\"type\": \"array\", \"minItems\": 2, \"maxItems\": 2, \"items\": " + number + "}";
      break;
    case Type::NumOrList:
      main = number + ", {\"type\": \"array\", \"minItems\": 1, \"items\": " + number + "}";
      break;
    case Type::Groups:
      main =
          "{\"type\": \"array\", \"items\": {\"type\": \"object\", \"required\": [\"pattern\"], "
          "\"additionalProperties\": false, \"properties\": {"
          "\"pattern\": {\"type\": \"string\"}, \"lr\": {\"type\": \"number\", \"minimum\": 0}, \"weight_decay\": "
          "{\"type\": \"number\", \"minimum\": 0}}}}";
      break;
    case Type::Block:
      main = "{\"type\": \"object\"}";
      break;
    case Type::Any:
      return "";
  }
  if (key.nullable()) main += ", {\"type\": \"null\"}";
  if (!key.auto_rule.empty()) main += ", {\"const\": \"auto\"}";
  return "\"anyOf\": [" + main + "]";
}

std::string effect_word(const Key& key) {
  switch (key.effect) {
    case Effect::Works:
      return "works";
    case Effect::NoEffect:
      return "no effect";
    case Effect::NotBuilt:
      return "not built";
    case Effect::Refused:
      return "refused";
  }
  return {};
}

std::string property_json(const Key& key) {
  std::string out = "{";
  const auto add = [&](const std::string& text) { out += (out.size() > 1 ? ", " : "") + text; };
  if (const auto type = type_json(key); !type.empty()) add(type);
  add("\"description\": " + json_quote(key.help));
  if (!key.default_json.empty()) add("\"default\": " + key.default_json);
  if (const auto need = config::condition_of({}, key.when).word; !need.empty())
    add("\"x-libzero-needs\": " + json_quote(need));
  add("\"x-libzero-effect\": " + json_quote(effect_word(key)));
  if (!key.reason.empty()) add("\"x-libzero-reason\": " + json_quote(key.reason));
  if (!key.unit.empty()) add("\"x-libzero-unit\": " + json_quote(key.unit));
  if (!key.auto_rule.empty()) add("\"x-libzero-auto\": " + json_quote(key.auto_rule));
  return out + "}";
}

std::string object_json(const std::string& block, int depth);

std::string member_json(const std::string& path, int depth) {
  if (const Key* key = config::find_key(path)) return property_json(*key);
  if (config::is_block(path)) {
    const std::string object = object_json(path, depth);
    if (path == "zero_optimization")
      return "{\"anyOf\": [{\"type\": \"boolean\", \"deprecated\": true}, " + object + "]}";
    if (path == "zero_optimization.offload_param" || path == "zero_optimization.offload_optimizer")
      return "{\"anyOf\": [{\"type\": \"null\"}, " + object + "]}";
    return object;
  }
  for (const auto& old : config::old_names()) {
    if (old.old_path != path) continue;
    const std::string mark = std::string("\"deprecated\": ") + (old.deprecated ? "true" : "false") +
                             ", \"description\": " + json_quote("Old name of " + std::string(old.path));
    const bool boolean = path.find("cpu_offload") != std::string::npos || path == "fp32_allreduce";
    if (boolean) return "{\"type\": \"boolean\", " + mark + "}";
    if (const Key* key = config::find_key(old.path)) {
      const auto type = type_json(*key);
      return "{" + (type.empty() ? "" : type + ", ") + mark + "}";
    }
    return "{" + mark + ", \"allOf\": [" + object_json(std::string(old.path), depth) + "]}";
  }
  return "{}";
}

std::string object_json(const std::string& block, int depth) {
  const std::string indent(static_cast<std::size_t>(depth) * 2 + 2, ' ');
  std::string properties;
  for (const auto& name : config::names_below(block)) {
    const std::string path = block.empty() ? name : block + "." + name;
    properties += (properties.empty() ? "\n" : ",\n") + indent + json_quote(name) + ": " + member_json(path, depth + 1);
  }
  if (block.empty()) properties = "\n" + indent + "\"$schema\": {\"type\": \"string\"}," + properties;
  return "{\"type\": \"object\", \"additionalProperties\": false, \"properties\": {" + properties + "\n" +
         std::string(static_cast<std::size_t>(depth) * 2, ' ') + "}}";
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

std::string type_word(const Key& key) {
  switch (key.type) {
    case Type::Bool:
      return "bool";
    case Type::Int:
      return "int";
    case Type::Bytes:
      return "bytes";
    case Type::Num:
      return "num";
    case Type::Enum: {
      std::string out;
      for (const auto& choice : key.choices) out += (out.empty() ? "" : "|") + choice;
      return out;
    }
    case Type::Text:
      return "string";
    case Type::TextList:
      return "string or list";
    case Type::NumPair:
      return "[num, num]";
    case Type::NumOrList:
      return "num or list";
    case Type::Groups:
      return "list";
    case Type::Block:
      return "object";
    case Type::Any:
      return "any";
  }
  return {};
}

std::string range_word(const Key& key) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  if (key.low == -kInf && key.high == kInf) return {};
  if (key.high == kInf) return (key.above_low ? " > " : " >= ") + config::number_text(key.low);
  return std::string(" in ") + (key.above_low ? "(" : "[") + config::number_text(key.low) + ", " +
         config::number_text(key.high) + (key.below_high ? ")" : "]");
}

std::string type_text(const Key& key) {
  return type_word(key) + range_word(key) + (key.nullable() ? ", null" : "") + (key.auto_rule.empty() ? "" : ", auto");
}

}  // namespace

std::string config_schema() {
  std::string body = object_json("", 0);
  body.insert(1,
              "\"$schema\": \"https://json-schema.org/draft/2020-12/schema\", \"title\": \"libzero configuration\", ");
  return body + "\n";
}

std::string config_keys(std::string_view word) {
  const auto wanted = lower(word);
  std::string out;
  for (const Key& key : config::keys()) {
    if (lower(key.path).find(wanted) == std::string::npos && lower(key.help).find(wanted) == std::string::npos)
      continue;
    out += key.path + "  " + type_text(key) + (key.default_json.empty() ? "" : "  default " + key.default_json) +
           "\n    " + std::string(key.help);
    if (key.effect != Effect::Works) out += " (" + effect_word(key) + ": " + std::string(key.reason) + ")";
    out += "\n";
  }
  return out;
}

std::string config_keys_markdown() {
  std::string out;
  std::string block = "-";
  for (const Key& key : config::keys()) {
    const auto dot = key.path.find('.');
    const std::string top(dot == std::string::npos ? "" : key.path.substr(0, dot));
    if (top != block) {
      block = top;
      out += "\n### " + (block.empty() ? std::string("Top level") : "`" + block + "`") +
             "\n\n| key | type, range | default | effect | meaning |\n|---|---|---|---|---|\n";
    }
    std::string type = type_text(key);
    for (std::size_t at = 0; (at = type.find('|', at)) != std::string::npos; at += 2) type.replace(at, 1, "\\|");
    out += "| `" + key.path + "` | " + type + " | " + (key.default_json.empty() ? "-" : "`" + key.default_json + "`") +
           " | " + effect_word(key) + (key.reason.empty() ? "" : ": " + std::string(key.reason)) + " | " +
           std::string(key.help) + (key.owners.empty() ? "" : " (" + std::string(key.owners) + ")") + " |\n";
  }
  return out;
}

}  // namespace zero
