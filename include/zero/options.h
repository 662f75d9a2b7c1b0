// The immutable description of a run: DeepSpeed's JSON keys with DeepSpeed's meaning, checked
// strictly. See docs/configuration.md, which is generated from the same table as the parser.
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
struct Document;  // the parsed file with positions and sources; src/config
struct Settings;  // typed values; src/core/config/settings.h
}  // namespace config

// One key given outside the file. `key` is dotted ("zero_optimization.stage"); `value` is JSON text,
// or a plain string when it is not JSON; `source` is what explain() shows. With only_auto it
// applies only where the file says "auto" (or, for the batch sizes, nothing).
struct Setting {
  std::string key, value, source = "program";
  bool only_auto = false;
};

class OptionsBuilder;

class ZERO_API Options {
 public:
  // Defaults only: stage 0, fp32, no optimizer chosen.
  Options();

  // Reads a configuration file. Throws ConfigError that lists ALL faults, each with
  // file:line:col, JSON pointer, id, source line and hint; IoError when it cannot be read.
  static Options from_file(const std::filesystem::path& json) { return from_file(json, {}); }
  static Options from_json(std::string_view text, std::string_view name = "<text>") {
    return from_json(text, name, {});
  }
  // The same with keys from elsewhere on top; later ones win.
  static Options from_file(const std::filesystem::path& json, const std::vector<Setting>& settings);
  static Options from_json(std::string_view text, std::string_view name, const std::vector<Setting>& settings);

  // Options written in code (options_builder.h): Options::build().stage(3).bf16().adamw({.lr = 1e-3})...
  static OptionsBuilder build();

  // A copy in which some keys have other values. Throws ConfigError as from_json does.
  Options with(const std::vector<Setting>& settings) const;
  Options with(std::string_view key, std::string_view value, std::string_view source = "program") const {
    return with({Setting{std::string(key), std::string(value), std::string(source)}});
  }

  // Every effective value and where it came from; `all` includes untouched defaults.
  // `world` is the number of ranks that the batch sizes are resolved for.
  std::string explain() const { return explain(1, false); }
  std::string explain(int world, bool all) const;

  // Notices: deprecated names, keys without effect here, clamps. One line each.
  std::vector<std::string> notices() const;

  // A digest of every effective value: ranks compare it at start-up.
  std::string digest() const;
  // Every effective value as text by dotted key; what digest() is taken of.
  std::map<std::string, std::string> effective() const;

  const config::Settings& settings() const;
  const config::Document& document() const { return *document_; }

 private:
  explicit Options(std::shared_ptr<const config::Document> document) : document_(std::move(document)) {}
  std::shared_ptr<const config::Document> document_;
};

}  // namespace zero
