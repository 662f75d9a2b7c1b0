// Fields of Settings from JSON and as JSON.
#include "config/key_fields.h"

#include <algorithm>

#include "base/json_write.h"

namespace zero::config {
namespace {

std::int64_t whole_of(const Value& value) { return whole_number(value.text).value_or(0); }

}  // namespace

void read_value(const Value& value, bool& field) { field = value.boolean; }
void read_value(const Value& value, std::int64_t& field) { field = whole_of(value); }
void read_value(const Value& value, std::uint64_t& field) { field = static_cast<std::uint64_t>(whole_of(value)); }
void read_value(const Value& value, int& field) {
  using Limits = std::numeric_limits<int>;
  field = static_cast<int>(std::clamp<std::int64_t>(whole_of(value), Limits::min(), Limits::max()));
}
// Of the canonical text: "-0" is 0.
void read_value(const Value& value, double& field) { field = finite_number(value.json()).value_or(0); }
void read_value(const Value& value, std::string& field) { field = value.text; }
void read_value(const Value& value, PerGroup& field) {
  field.clear();
  for (const Value& item : value.items) read_value(item, field.emplace_back());
  if (value.is(Value::Kind::Number)) read_value(value, field.emplace_back());
}
void read_value(const Value& value, std::vector<std::string>& field) {
  field.clear();
  for (const Value& item : value.items) field.push_back(item.text);
}
void read_value(const Value& value, std::vector<ParameterGroup>& field) {
  field.clear();
  for (const Value& item : value.items) {
    ParameterGroup& group = field.emplace_back();
    group.pattern = item.find("pattern")->text;
    if (const Value* lr = item.find("lr")) read_value(*lr, group.lr);
    if (const Value* decay = item.find("weight_decay")) read_value(*decay, group.weight_decay);
  }
}

std::string json_of(bool field) { return field ? "true" : "false"; }
std::string json_of(double field) { return number_text(field); }
std::string json_of(const std::string& field) { return base::json_quote(field, base::NotUtf8::Keep); }
// One number for all groups is no list.
std::string json_of(const PerGroup& field) { return field.size() == 1 ? json_of(field[0]) : json_of<double>(field); }
std::string json_of(const ParameterGroup& field) {
  std::string out = "{\"pattern\": " + json_of(field.pattern);
  if (field.lr) out += ", \"lr\": " + json_of(*field.lr);
  if (field.weight_decay) out += ", \"weight_decay\": " + json_of(*field.weight_decay);
  return out + "}";
}

}  // namespace zero::config
