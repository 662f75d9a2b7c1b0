// Fields of Settings as rows of the table of keys name them: a member, whose type gives the key's type, or what one of
// the functions below makes of it. Each can be set to a checked value and written as JSON.
#pragma once
#include <algorithm>
#include <concepts>
#include <initializer_list>
#include <type_traits>
#include <utility>

#include "config/json_value.h"
#include "config/key_table.h"
#include "config/settings.h"

namespace zero::config {

// Fields from checked values other than null.
void read_value(const Value& value, bool& field);
void read_value(const Value& value, int& field);
void read_value(const Value& value, std::int64_t& field);
void read_value(const Value& value, std::uint64_t& field);
void read_value(const Value& value, double& field);
void read_value(const Value& value, std::string& field);
void read_value(const Value& value, PerGroup& field);
void read_value(const Value& value, std::vector<std::string>& field);
void read_value(const Value& value, std::vector<ParameterGroup>& field);
template <class T>
void read_value(const Value& value, std::optional<T>& field) {
  read_value(value, field.emplace());
}

// Fields as JSON; "": an optional without value.
std::string json_of(bool field);
std::string json_of(double field);
std::string json_of(const std::string& field);
std::string json_of(const ParameterGroup& field);
std::string json_of(const PerGroup& field);
std::string json_of(const char*) = delete;  // it would be a flag
std::string json_of(std::integral auto field) { return std::to_string(field); }
template <class T>
std::string json_of(const std::vector<T>& field) {
  std::string out;
  for (const T& item : field) out += (out.empty() ? "" : ", ") + json_of(item);
  return "[" + out + "]";
}
template <class T>
std::string json_of(const std::optional<T>& field) {
  return field ? json_of(*field) : std::string();
}

// T of std::optional<T>.
template <class T>
struct Bare {
  using Type = T;
};
template <class T>
struct Bare<std::optional<T>> : Bare<T> {};

template <class T>
constexpr Type type_of() {
  return std::is_same_v<T, bool>                          ? Type::Bool
         : std::is_integral_v<T>                          ? Type::Int
         : std::is_same_v<T, double>                      ? Type::Num
         : std::is_same_v<T, std::string>                 ? Type::Text
         : std::is_same_v<T, PerGroup>                    ? Type::NumOrList
         : std::is_same_v<T, std::vector<std::string>>    ? Type::TextList
         : std::is_same_v<T, std::vector<ParameterGroup>> ? Type::Groups
                                                          : Type::Any;
}

// A field of Settings, or of one of its parts.
template <class Owner>
struct Field {
  Type type;
  std::function<void(const Value&, Owner&)> read;
  std::function<std::string(const Owner&)> json;
  std::string empty;                   // the JSON of a field without value
  std::vector<std::string> choices{};  // Enum

  template <class T>
  Field(T Owner::*member)  // NOLINT(google-explicit-constructor): a row names a member
      : Field(
            type_of<typename Bare<T>::Type>(), member, [](const Value& value, T& field) { read_value(value, field); },
            [](const T& field) { return json_of(field); }) {}
  // A member that `from` sets to a value other than null, and `to` writes.
  template <class T, class From, class To>
  Field(Type of, T Owner::*member, From from, To to)
      : Field(
            of,
            [member, from](const Value& value, Owner& owner) {
              if (value.is(Value::Kind::Null))
                owner.*member = T{};
              else
                from(value, owner.*member);
            },
            [member, to](const Owner& owner) { return to(owner.*member); }, to(T{})) {}
  Field(Type of, decltype(read) from, decltype(json) to, std::string none)
      : type(of), read(std::move(from)), json(std::move(to)), empty(std::move(none)) {}
};

// A field of a part.
template <class Outer, class Owner>
Field<Outer> in(Owner Outer::*part, const std::type_identity_t<Field<Owner>>& field) {
  Field<Outer> outer(
      field.type, [=](const Value& value, Outer& owner) { field.read(value, owner.*part); },
      [=](const Outer& owner) { return field.json(owner.*part); }, field.empty);
  outer.choices = field.choices;
  return outer;
}

template <class T>
struct Word {
  std::string_view text;
  T value;
};
template <class T>
using Words = std::vector<Word<typename Bare<T>::Type>>;

// A field whose values are called by words. A value without a word is an empty field.
template <class Owner, class T>
Field<Owner> words(T Owner::*member, const Words<T>& all) {
  Field<Owner> field(
      Type::Enum, member,
      [all](const Value& value, T& to) {
        for (const auto& word : all)
          if (word.text == value.text) to = word.value;
      },
      [all](const T& from) {
        for (const auto& word : all)
          if (from == word.value) return json_of(std::string(word.text));
        return std::string();
      });
  for (const auto& word : all) field.choices.emplace_back(word.text);
  return field;
}

// A text out of some.
template <class Owner, class T>
Field<Owner> one_of(T Owner::*member, std::string_view choices) {
  Field<Owner> field(member);
  field.type = Type::Enum;
  field.choices = split_words(choices);
  return field;
}

template <class Owner, class T>
Field<Owner> bytes(T Owner::*member) {
  Field<Owner> field(member);
  field.type = Type::Bytes;
  return field;
}

template <class Owner>
Field<Owner> pair(double Owner::*first, double Owner::*second) {
  return {Type::NumPair,
          [=](const Value& value, Owner& owner) {
            read_value(value.items.at(0), owner.*first);
            read_value(value.items.at(1), owner.*second);
          },
          [=](const Owner& owner) {
            return json_of(PerGroup{owner.*first, owner.*second});
          },
          json_of(PerGroup{0, 0})};
}

// A flag that gives a member one of its values.
template <class Owner, class T>
Field<Owner> is(T Owner::*member, T chosen) {
  return {Type::Bool, member,
          [chosen](const Value& value, T& field) {
            if (value.boolean) field = chosen;
          },
          [chosen](T field) { return json_of(field == chosen); }};
}

// A degree whose 1 is written as 0.
template <class Owner>
Field<Owner> zero_for_one(int Owner::*member) {
  return {Type::Int, member,
          [](const Value& value, int& field) {
            read_value(value, field);
            field = std::max(field, 1);
          },
          [](int field) { return json_of(field == 1 ? 0 : field); }};
}

// A key that typed_settings() reads itself.
template <class Owner>
Field<Owner> unstored(Type type) {
  return {type, [](const Value&, Owner&) {}, [](const Owner&) { return std::string(); }, {}};
}

}  // namespace zero::config
