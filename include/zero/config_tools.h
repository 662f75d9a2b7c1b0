// Checks, explains and documents configurations, as `zero config` does. Everything is local and comes from one table of
// keys; nothing starts a run.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <zero/export.h>
#include <zero/options.h>

namespace zero {

// One finding in a configuration. An error makes a configuration unusable. A notice reports a key that has no effect,
// has a deprecated name, or was clamped.
struct ConfigFault {
  enum class Severity { Error, Notice };
  std::string id;  // "unknown-key", "wrong-type", "out-of-range", ... (docs/configuration.md)
  Severity severity = Severity::Error;
  std::string file;
  int line = 0, column = 0;  // 1-based, columns in code points; 0: unknown
  std::string pointer;       // JSON pointer, RFC 6901
  std::string message, hint;
  std::string source_line;  // the line of the file; marked from `column` on, mark_width code points
  int mark_width = 1;
  std::vector<std::string> related;  // related locations, "file:line:col"
  bool operator==(const ConfigFault&) const = default;
};

// All findings of a file: its faults, keys that this version does not support and, with `world`, batch sizes that do
// not fit that number of ranks. "-" is stdin. Throws IoError if the file cannot be read.
ZERO_API std::vector<ConfigFault> check_config(const std::filesystem::path& file,
                                               const std::vector<Setting>& settings = {},
                                               std::optional<int> world = {});

// For each finding "file:line:col: error: /pointer: text [id]" with the source line, a caret and the hint, then "1
// error, 0 notices in file". Errors after the first 100 are only counted.
ZERO_API std::string faults_text(const std::vector<ConfigFault>& faults, std::string_view name);
// One JSON document, schema "zero.config.check/1".
ZERO_API std::string faults_json(const std::vector<ConfigFault>& faults, std::string_view name);

// Options::explain as one JSON document, schema "zero.config.explain/1".
ZERO_API std::string explain_json(const Options& options, int world, bool all);

// Why these batch sizes do not allow a run, and what to add; empty if they do. Without `world`, reports only what is
// wrong for every number of ranks.
ZERO_API std::string cannot_start(const Options& options, std::optional<int> world);

// JSON Schema 2020-12 of the configuration file.
ZERO_API std::string config_schema();

// The table of keys as text or Markdown, limited to rows whose path or text contains `word`.
ZERO_API std::string config_keys(std::string_view word = {});
ZERO_API std::string config_keys_markdown();

// The name that is most similar to a misspelt word: smallest Damerau-Levenshtein distance, ignoring case, of at most
// max(2, length / 3). Empty if there is none. The first of equals wins.
ZERO_API std::string nearest_name(std::string_view word, const std::vector<std::string>& names);

}  // namespace zero
