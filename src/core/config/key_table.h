// The table of configuration keys: one row a key. The reader, suggestions of similar names, explain, the schema and the
// documentation walk its rows. keys_*.cpp have the keys that work, with their fields of Settings; unsupported_keys.cpp
// lists the others.
#pragma once
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zero::config {

struct Settings;
struct Value;

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

// When a key has an effect. At other times a notice says why not (conditions.cpp).
enum class When {
  Always,
  Api,  // the program decides, so this is not checked
  StagesFrom1,
  Stages1And2,
  Stage3,
  TensorParallel,
  Experts,
  OptimizerOffloaded,
  OptimizerInFile,
  ParamsOffloaded,
  ParamsInFile,
  ActivationsOffloaded,
  ActivationsInFile,
  AnyFile,
  Fp16,
  NotFp16,
  ScalesLoss,
  DynamicScale,
  Bf16,
  SixteenBit,
  NarrowStates,
  TensorBoard,
  CsvMonitor,
  Postscale,
};

// What Rules::empty may be.
inline constexpr std::string_view kNull = "null", kAuto = "\"auto\"", kNone = "";

// What a row says of a key's values besides their type.
struct Rules {
  double low = -std::numeric_limits<double>::infinity(), high = std::numeric_limits<double>::infinity();
  bool above_low = false, below_high = false;  // the limit itself is not allowed
  std::int64_t multiple = 1;
  // The JSON of an empty field (an optional without value, 0, no text): null, which is then allowed; "auto"; or no
  // default. Not given: null for optionals, and the value for others.
  std::optional<std::string_view> empty{};
  std::string_view auto_rule{};  // rule for "auto"; empty: not allowed
  When when = When::Always;
  std::string_view owners{};  // optimizer or schedule types that have this key; empty: all
  std::string_view unit{};
  std::string_view off_key{};  // Block: refused only if this key in it is true ("*": any "enabled")

  bool nullable() const { return empty == kNull; }
};

struct Key : Rules {
  std::string path{};  // dotted
  Type type = Type::Any;
  std::vector<std::string> choices{};  // Enum
  std::string default_json{};          // empty: none, or inferred
  std::string_view help{};             // documentation text
  Effect effect = Effect::Works;
  std::string_view reason{};  // of other effects
  // Of keys that work: sets the field to a checked value, or empties it for null; writes the field.
  std::function<void(const Value&, Settings&)> read{};
  std::function<std::string(const Settings&)> json{};
};

struct OldName {
  std::string_view old_path, path;
  bool deprecated = true;
};

std::span<const Key> keys();  // in display order
std::span<const OldName> old_names();

const Key* find_key(std::string_view path);
// Throws InternalError if there is no such key.
const Key& key_at(std::string_view path);
// Whether some key's path begins with "path.".
bool is_block(std::string_view path);
// Names that are valid directly below a block ("" = top level), including old names.
std::vector<std::string> names_below(std::string_view block);
// "Adam AdamW" -> {"Adam", "AdamW"}.
std::vector<std::string> split_words(std::string_view text);
// Full paths whose last name is `name`.
std::vector<std::string> paths_named(std::string_view name);

// The parts of the table, in display order.
void add_training_keys(std::vector<Key>& keys);
void add_zero_keys(std::vector<Key>& keys);
void add_run_keys(std::vector<Key>& keys);
// Puts the keys without effect behind those that they are displayed after.
void insert_unsupported_keys(std::vector<Key>& keys);

}  // namespace zero::config
