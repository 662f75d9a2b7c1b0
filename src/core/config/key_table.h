// The table of configuration keys. It is the basis of the reader, suggestions of similar names, explain, the schema and
// the documentation. Rows describe keys; the code that reads Settings implements them.
#pragma once
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zero::config {

// The rule for "auto" of most keys.
inline constexpr std::string_view kDefault = "the default";

enum class Type {
  Bool,
  Int,
  Num,
  Enum,
  Text,
  Bytes,      // a whole number of bytes, or a string with a unit: "2GB" (10^9), "2GiB" (2^30)
  TextList,   // one string or a list of strings
  NumPair,    // a pair of numbers
  NumOrList,  // one number, or one per parameter group
  Groups,     // list of {pattern, lr, weight_decay}
  Any,        // any JSON
  Block,      // an object whose keys are not checked
};

enum class Effect {
  Works,
  NoEffect,  // accepted and reported
  NotBuilt,  // a value other than the default is refused when the engine is constructed
  Refused,   // a value other than the default is refused immediately
};

struct Key {
  std::string_view path;  // dotted
  Type type;
  std::string_view default_json;  // the default as JSON; empty: none, or inferred
  std::string_view help;          // documentation text
  double low = -std::numeric_limits<double>::infinity(), high = std::numeric_limits<double>::infinity();
  bool above_low = false, below_high = false;  // the limit itself is not allowed
  std::int64_t multiple = 1;
  std::string_view choices{};  // Enum: "mean sum"
  bool nullable = false;
  std::string_view auto_rule{};  // rule for "auto"; empty: not allowed
  std::string_view active_if{};  // name of a condition (document.cpp); empty: always active
  std::string_view owners{};     // optimizer or schedule types that have this key; empty: all
  Effect effect = Effect::Works;
  std::string_view reason{};  // of NoEffect, NotBuilt, Refused
  std::string_view unit{};
  std::string_view off_key{};  // Block: refused only if this key in it is true ("*": any "enabled")
};

struct OldName {
  std::string_view old_path, path;
  bool deprecated = true;
};

std::span<const Key> keys();
std::span<const OldName> old_names();

const Key* find_key(std::string_view path);
// Whether some key's path begins with "path.".
bool is_block(std::string_view path);
// Names that are valid directly below a block ("" = top level), including old names.
std::vector<std::string> names_below(std::string_view block);
// Full paths whose last name is `name`.
std::vector<std::string> paths_named(std::string_view name);

// The parts of the table, in display order (key_table_*.cpp).
std::span<const Key> training_keys();
std::span<const Key> zero_keys();
std::span<const Key> parallel_keys();
std::span<const Key> other_keys();

}  // namespace zero::config
