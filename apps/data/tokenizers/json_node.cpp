// See json_node.h.
#include "apps/data/tokenizers/json_node.h"

#include <algorithm>
#include <stdexcept>

#include "apps/data/mapped_file.h"

namespace data {

JsonNode JsonNode::read(const std::string& file, std::string_view text) {
  try {
    auto root = std::make_shared<const Json>(read_json(text, {.depth = 24}));
    const auto* json = root.get();
    return {std::make_shared<const std::string>(file), std::move(root), json, ""};
  } catch (const JsonFault& fault) {
    fail_file("tokenizer", file + ":" + std::to_string(line_of(text, fault.offset)), fault.what(), "JSON");
  }
}

void JsonNode::fail(const std::string& got, const std::string& expected) const {
  throw std::runtime_error("[tokenizer " + *file_ + "] " + (place_.empty() ? "the top level" : place_) + ": got " +
                           got + ", expected " + expected);
}

void JsonNode::unsupported(const std::string& what, const std::string& known) const {
  fail(what.substr(0, 100) + ", which is not supported", known);
}

bool JsonNode::has(std::string_view key) const {
  const auto* value = json_->find(key);
  return value != nullptr && !value->is(Json::Kind::Null);
}

JsonNode JsonNode::at(const std::string& key) const {
  if (!is(Json::Kind::Object)) fail(json_->kind_name(), "an object");
  const auto* value = json_->find(key);
  if (value == nullptr) fail("no \"" + key + "\"", "it");
  return child(*value, key);
}

std::optional<JsonNode> JsonNode::find(const std::string& key) const {
  if (!has(key)) return std::nullopt;
  return at(key);
}

std::vector<JsonNode> JsonNode::items() const {
  if (!is(Json::Kind::List)) fail(json_->kind_name(), "a list");
  std::vector<JsonNode> all;
  for (std::size_t i = 0; i < json_->items.size(); ++i) all.push_back(child(json_->items[i], std::to_string(i)));
  return all;
}

void JsonNode::only(std::initializer_list<std::string_view> keys) const {
  if (!is(Json::Kind::Object)) fail(json_->kind_name(), "an object");
  for (const auto& [name, value] : json_->fields)
    if (std::find(keys.begin(), keys.end(), name) == keys.end())
      fail("the unknown key \"" + name.substr(0, 80) + "\"", "a component that is known");
}

const std::string& JsonNode::text() const {
  if (!is(Json::Kind::Text)) fail(json_->kind_name(), "a text");
  return json_->text;
}

bool JsonNode::boolean() const {
  if (!is(Json::Kind::Bool)) fail(json_->kind_name(), "true or false");
  return json_->boolean;
}

std::int64_t JsonNode::integer(std::int64_t least, std::int64_t most) const {
  if (!is(Json::Kind::Integer)) fail(json_->kind_name(), "an integer");
  if (json_->integer < least || json_->integer > most)
    fail(std::to_string(json_->integer), std::to_string(least) + " to " + std::to_string(most));
  return json_->integer;
}

double JsonNode::number() const {
  if (!is(Json::Kind::Number) && !is(Json::Kind::Integer)) fail(json_->kind_name(), "a number");
  return json_->number;
}

std::string JsonNode::text_or(const std::string& key, const std::string& otherwise) const {
  return has(key) ? at(key).text() : otherwise;
}

bool JsonNode::boolean_or(const std::string& key, bool otherwise) const {
  return has(key) ? at(key).boolean() : otherwise;
}

std::string read_tokenizer_file(const std::string& path, std::size_t most) {
  const MappedFile file(path, "tokenizer");
  if (file.size() > static_cast<std::int64_t>(most))
    fail_file("tokenizer", path, std::to_string(file.size()) + " bytes", "at most " + std::to_string(most));
  return {reinterpret_cast<const char*>(file.data()), static_cast<std::size_t>(file.size())};
}

}  // namespace data
