// What `zero config` is made of, for programs that check, explain or document configurations
// themselves. Everything comes from the one key table; nothing here runs anything.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <zero/export.h>
#include <zero/options.h>

namespace zero {

// One finding in a configuration. Errors keep a configuration from being used; notices say what
// was accepted without effect, under an old name, or clamped.
struct ConfigFault {
  enum class Severity { Error, Notice };
  std::string id;  // "unknown-key", "wrong-type", "out-of-range", ... (docs/configuration.md)
  Severity severity = Severity::Error;
  std::string file;
  int line = 0, column = 0;  // 1-based, columns in code points; 0: no place
  std::string pointer;       // JSON pointer, RFC 6901
  std::string message, hint;
  std::string source_line;  // the line of the file, and below which columns the marks go
  int mark_width = 1;
  std::vector<std::string> related;  // other places, "file:line:col"
  bool operator==(const ConfigFault&) const = default;
};

// All findings of a file: its faults, what this version cannot do, and (with `world`) batch sizes
// that do not fit that many ranks. Throws IoError when it cannot be read; "-" is stdin.
ZERO_API std::vector<ConfigFault> check_config(const std::filesystem::path& file,
                                               const std::vector<Setting>& settings = {},
                                               std::optional<int> world = {});

// "file:line:col: error: /pointer: text [id]" with the source line, a caret and the hint, for each,
// then "1 error, 0 notices in file". After 100 errors the rest is counted.
ZERO_API std::string faults_text(const std::vector<ConfigFault>& faults, std::string_view name);
// One JSON document, schema "zero.config.check/1".
ZERO_API std::string faults_json(const std::vector<ConfigFault>& faults, std::string_view name);

// Options::explain as one JSON document, schema "zero.config.explain/1".
ZERO_API std::string explain_json(const Options& options, int world, bool all);

// Why no run can start with these batch sizes: what is missing or does not fit, and what to add. With `world` for that
// many ranks, without one only what no number of ranks mends. Empty when a run can start.
ZERO_API std::string cannot_start(const Options& options, std::optional<int> world);

// JSON Schema 2020-12 of the configuration file.
ZERO_API std::string config_schema();

// The key table as text, or as Markdown; only rows whose path or text has `word` in it.
ZERO_API std::string config_keys(std::string_view word = {});
ZERO_API std::string config_keys_markdown();

// The name a misspelt word was meant to be: smallest Damerau-Levenshtein distance of at most
// max(2, length / 3), ignoring case; empty when nothing is near enough. Of equals, the first wins.
ZERO_API std::string nearest_name(std::string_view word, const std::vector<std::string>& names);

}  // namespace zero
