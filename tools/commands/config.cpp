// `zero config`: check, explain, schema and keys of one file.
#include <string>
#include <vector>

#include <zero/config_tools.h>

#include "base/printable.h"
#include "tools/commands.h"
#include "tools/support/config_check.h"
#include "tools/support/console.h"
#include "tools/support/options.h"

namespace zero::cli {
namespace {

using Severity = ConfigFault::Severity;

std::vector<Setting> settings_of(const std::vector<std::pair<std::string, std::string>>& set) {
  std::vector<Setting> settings;
  for (const auto& [key, value] : set) settings.push_back({key, value, "CLI", false});
  return settings;
}

void strictly(std::vector<ConfigFault>& faults) {
  for (auto& fault : faults) fault.severity = Severity::Error;
}

bool any_error(const std::vector<ConfigFault>& faults) {
  for (const auto& fault : faults)
    if (fault.severity == Severity::Error) return true;
  return false;
}

// The options of both commands.
struct FileOptions {
  std::string file;
  std::vector<std::pair<std::string, std::string>> set;
  bool strict = false;
  std::int64_t world = 0;
  void declare(Command& command) {
    command.config(file, set, strict);
    command.positional(file, "FILE", "configuration, or - for stdin", false);
    command.option("--world", world, "N", "number of ranks for the batch sizes", 1, 1 << 20);
  }
  void require(const std::string& name) const {
    if (file.empty())
      throw ConfigError("[zero config " + name + "] got no file, expected one. Hint: zero config " + name + " ds.json");
  }
};

int check(int argc, char** argv) {
  FileOptions o;
  Command command("config check", "Lists every fault and notice of a configuration; exit 0 or 2.", "FILE [options]",
                  "zero config check ds.json --world 4");
  o.declare(command);
  if (!command.parse(argc, argv)) return 0;
  o.require("check");
  auto faults = check_config(o.file, settings_of(o.set),
                             o.world > 0 ? std::optional<int>(static_cast<int>(o.world)) : std::nullopt);
  if (o.strict) strictly(faults);
  const bool bad = any_error(faults);
  print_result(command.global().json ? faults_json(faults, o.file) : faults_text(faults, o.file));
  return bad ? static_cast<int>(ExitCode::kConfig) : 0;
}

int explain(int argc, char** argv) {
  FileOptions o;
  bool all = false;
  Command command("config explain", "Shows every effective value and its source; exit 2 if no run can start.",
                  "FILE [options]", "zero config explain ds.json --world 4");
  o.declare(command);
  command.flag("--all", all, "also show values that were not set");
  if (!command.parse(argc, argv)) return 0;
  o.require("explain");
  const auto options = Options::from_file(o.file, settings_of(o.set));
  const int world = o.world > 0 ? static_cast<int>(o.world) : 1;
  if (command.global().json) {
    print_result(explain_json(options, world, all));
  } else {
    // Why no run can start is no value: it goes to stderr.
    std::string text = options.explain(world, all);
    const std::size_t reason = text.rfind("\ncannot start");
    const std::string why = reason == std::string::npos ? "" : text.substr(reason + 1);
    if (!why.empty()) text.erase(reason + 1);
    print_result(text);
    if (!why.empty()) {
      const bool fails = o.world > 0 || !cannot_start(options, {}).empty();
      print_note("config explain", fails ? LogLevel::Error : LogLevel::Info,
                 why.substr(0, why.find_last_not_of('\n') + 1));
    }
    if (o.world == 0)
      print_note("config explain", LogLevel::Info, "batch sizes are for 1 rank; give --world N for others");
  }
  // As in `check`: the values are shown, but no run can use them.
  const auto asked = o.world > 0 ? std::optional<int>(world) : std::nullopt;
  return cannot_start(options, asked).empty() ? 0 : static_cast<int>(ExitCode::kConfig);
}

int schema(int argc, char** argv) {
  std::string file;
  Command command("config schema", "Writes the JSON Schema (2020-12) of the configuration file.", "[options]",
                  "zero config schema > zero.schema.json");
  command.positional(file, "FILE", "ignored: the schema is the same for all files", false);
  if (!command.parse(argc, argv)) return 0;
  print_result(config_schema());
  return 0;
}

int keys(int argc, char** argv) {
  std::string word;
  bool markdown = false;
  Command command("config keys", "Lists the keys whose name or description contains WORD.", "[WORD] [options]",
                  "zero config keys clip");
  command.positional(word, "WORD", "any part of a key or its description", false);
  command.flag("--markdown", markdown, "as the tables of docs/configuration.md");
  if (!command.parse(argc, argv)) return 0;
  print_result(markdown ? config_keys_markdown() : config_keys(word));
  return 0;
}

constexpr const char* kHelp = R"(zero config: read a configuration without running it

Usage: zero config check|explain|schema|keys ...

  check FILE      every fault and notice, with its place; exit 0 or 2
  explain FILE    every effective value and where it came from
  schema          JSON Schema of the file
  keys [WORD]     the table of keys

Example
  zero config explain ds.json --world 4 --set zero_optimization.stage=3
)";

}  // namespace

void check_config(const std::string& file, const std::vector<std::pair<std::string, std::string>>& set, bool strict) {
  auto faults = zero::check_config(file, settings_of(set));
  if (strict) strictly(faults);
  if (any_error(faults))
    throw ConfigError("[--config] the configuration cannot be used:\n" + faults_text(faults, file));
  for (const auto& fault : faults)
    print_note("run", LogLevel::Info,
               base::printable(fault.file + ":" + std::to_string(fault.line) + ":" + std::to_string(fault.column) +
                                   ": " + fault.pointer + ": " + fault.message,
                               base::Lines::Escape));
}

}  // namespace zero::cli

int zero_config(int argc, char** argv) {
  using namespace zero::cli;
  const std::string verb = argc > 1 ? argv[1] : "";
  struct Entry {
    const char* name;
    int (*run)(int, char**);
  };
  const Entry entries[] = {{"check", check}, {"explain", explain}, {"schema", schema}, {"keys", keys}};
  std::vector<std::string> names;
  for (const Entry& entry : entries) {
    if (verb == entry.name) return entry.run(argc - 1, argv + 1);
    names.emplace_back(entry.name);
  }
  if (verb == "-h" || verb == "--help" || verb == "help") {
    print_result(kHelp);
    return 0;
  }
  const auto near = zero::nearest_name(verb, names);
  throw zero::ConfigError("[zero config] got " + (verb.empty() ? "no word" : "\"" + verb.substr(0, 80) + "\"") +
                          ", expected check, explain, schema or keys" +
                          (near.empty() ? ". Hint: zero config --help" : ". Hint: did you mean \"" + near + "\"?"));
}
