// The immutable configuration of a run: DeepSpeed's JSON keys with DeepSpeed's meaning, strictly checked. Reference:
// docs/configuration.md, generated from the parser's table of keys. All calls are local.
#pragma once
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <zero/export.h>

namespace zero {
namespace config {
struct Document;  // the parsed file with positions and sources; src/core/config/document.h
struct Settings;  // typed values; src/core/config/settings.h
}  // namespace config

// One key set outside the file. `key` is dotted ("zero_optimization.stage"). `value` is JSON text, or a plain string if
// it is not JSON. `source` is shown by explain(). only_auto: applies only if the file says "auto" (or, for batch sizes,
// does not set the key).
struct Setting {
  std::string key, value, source = "program";
  bool only_auto = false;
};

class OptionsBuilder;

class ZERO_API Options {
 public:
  // Default values: stage 0, fp32, no optimizer.
  Options();

  // Reads a configuration file. Throws ConfigError that lists all faults, each with file:line:col, JSON pointer, id,
  // source line and hint. Throws IoError if the file cannot be read.
  static Options from_file(const std::filesystem::path& json) { return from_file(json, {}); }
  static Options from_json(std::string_view text, std::string_view name = "<text>") {
    return from_json(text, name, {});
  }
  // The same with additional settings, which override the file; of equal keys the last wins.
  static Options from_file(const std::filesystem::path& json, const std::vector<Setting>& settings);
  static Options from_json(std::string_view text, std::string_view name, const std::vector<Setting>& settings);

  // Builds options in code (options_builder.h): Options::build().stage(3).bf16().adamw({.lr = 1e-3})...
  static OptionsBuilder build();

  // A copy with some keys changed. Throws ConfigError as from_json does.
  Options with(const std::vector<Setting>& settings) const;
  Options with(std::string_view key, std::string_view value, std::string_view source = "program") const {
    return with({Setting{std::string(key), std::string(value), std::string(source)}});
  }

  // All effective values and their sources. all: includes defaults that were not changed. world: the number of ranks
  // that batch sizes are resolved for.
  std::string explain() const { return explain(1, false); }
  std::string explain(int world, bool all) const;

  // Notices, one line each: deprecated names, keys that have no effect here, clamped values.
  std::vector<std::string> notices() const;

  // Whether the configuration or a setting gives this dotted key, be it its default.
  bool is_set(std::string_view key) const;

  // A digest of all effective values. Ranks compare it at start-up.
  std::string digest() const;
  // All effective values as text, by dotted key; the input of digest().
  std::map<std::string, std::string> effective() const;

  const config::Settings& settings() const;
  const config::Document& document() const { return *document_; }

 private:
  explicit Options(std::shared_ptr<const config::Document> document) : document_(std::move(document)) {}
  std::shared_ptr<const config::Document> document_;
};

}  // namespace zero
