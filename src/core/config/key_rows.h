// How a row of the table of keys is written: a name, a field of Settings, a help text and rules. The field's initial
// value is the default. Only the files with rows include this.
#pragma once
#include "config/key_fields.h"
#include "config/key_table.h"

namespace zero::config {

// Rules of a row.
constexpr auto at_least(double low) {
  return [=](Rules& rules) { rules.low = low; };
}
constexpr auto above(double low) {
  return [=](Rules& rules) { rules.low = low, rules.above_low = true; };
}
constexpr auto at_most(double high) {
  return [=](Rules& rules) { rules.high = high; };
}
constexpr auto below(double high) {
  return [=](Rules& rules) { rules.high = high, rules.below_high = true; };
}
constexpr auto multiple_of(std::int64_t number) {
  return [=](Rules& rules) { rules.multiple = number; };
}
constexpr auto nullable() {
  return [](Rules& rules) { rules.empty = kNull; };
}
constexpr auto unset_is_auto() {
  return [](Rules& rules) { rules.empty = kAuto; };
}
constexpr auto no_default() {
  return [](Rules& rules) { rules.empty = kNone; };
}
constexpr auto automatic(std::string_view rule) {
  return [=](Rules& rules) { rules.auto_rule = rule; };
}
constexpr auto needs(When when) {
  return [=](Rules& rules) { rules.when = when; };
}
constexpr auto owned_by(std::string_view types) {
  return [=](Rules& rules) { rules.owners = types; };
}
constexpr auto unit(std::string_view name) {
  return [=](Rules& rules) { rules.unit = name; };
}
constexpr auto refused_if(std::string_view key) {
  return [=](Rules& rules) { rules.off_key = key; };
}
template <class... Rule>
constexpr Rules rules_of(Rules rules, Rule... rule) {
  (rule(rules), ...);
  return rules;
}

void add_key(std::vector<Key>& keys, std::string path, const Field<Settings>& field, std::string_view help,
             const Rules& rules);

// Appends the rows of a block ("" = top level), whose fields are members of Settings, of a part, or of a part's part.
template <class Owner>
class Block {
 public:
  Block(std::vector<Key>& keys, std::string_view name) : Block(keys, name, [](const auto& field) { return field; }) {}
  Block(std::vector<Key>& keys, std::string_view name, Owner Settings::*part)
      : Block(keys, name, [=](const auto& field) { return in(part, field); }) {}
  template <class Part>
  Block(std::vector<Key>& keys, std::string_view name, Part Settings::*part, Owner Part::*inner)
      : Block(keys, name, [=](const auto& field) { return in(part, in(inner, field)); }) {}

  template <class... Rule>
  Block& key(std::string_view name, const Field<Owner>& field, std::string_view help, Rule... rules) {
    return add(name, field, help, rules_of(each_, rules...));
  }
  // A rule of all keys that follow.
  template <class Rule>
  Block& each(Rule rule) {
    rule(each_);
    return *this;
  }

 private:
  using OfSettings = std::function<Field<Settings>(const Field<Owner>&)>;
  Block(std::vector<Key>& keys, std::string_view name, OfSettings of_settings)
      : keys_(keys), prefix_(std::string(name) + (name.empty() ? "" : ".")), of_settings_(std::move(of_settings)) {}

  Block& add(std::string_view name, const Field<Owner>& field, std::string_view help, const Rules& rules) {
    add_key(keys_, prefix_ + std::string(name), of_settings_(field), help, rules);
    return *this;
  }

  std::vector<Key>& keys_;
  std::string prefix_;
  OfSettings of_settings_;
  Rules each_;
};
Block(std::vector<Key>&, std::string_view)->Block<Settings>;

}  // namespace zero::config
