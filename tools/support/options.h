// Options of a subcommand. Each declaration defines parser, help text and error messages. The rules are in docs/cli.md
// section 1: --a-b and --a_b are one option, no abbreviations, a single-valued option given twice is an error, an
// unknown option is reported with the most similar name.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/support/console.h"

namespace zero::cli {

class Command {
 public:
  // name: the words after "zero" ("run", "bench stages"); "" for another program (name_program()). usage: the text
  // after the name in the usage line. example: complete lines at the end of the help text.
  Command(std::string name, std::string summary, std::string usage, std::string example);
  ~Command();
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  // names: "-n,--num-gpus,--nproc-per-node", with dashes; the first long name is displayed. The variable keeps its
  // value if the option is not given. It must outlive parse().
  void flag(const std::string& names, bool& value, const std::string& help);
  void option(const std::string& names, std::string& value, const std::string& value_name, const std::string& help);
  void option(const std::string& names, std::int64_t& value, const std::string& value_name, const std::string& help,
              std::int64_t least, std::int64_t most);
  void option(const std::string& names, double& value, const std::string& value_name, const std::string& help,
              double least, double most);
  void choice(const std::string& names, std::string& value, const std::vector<std::string>& allowed,
              const std::string& help);
  // One value or several, each a word: "--num-experts 2 4". Replaces the variable's values.
  void numbers(const std::string& names, std::vector<std::int64_t>& values, const std::string& value_name,
               const std::string& help, std::int64_t least, std::int64_t most);
  // May be repeated.
  void repeated(const std::string& names, std::vector<std::string>& values, const std::string& value_name,
                const std::string& help);
  // Accepted with a notice, or refused with exit code 2. Not listed in the help.
  void no_effect(const std::string& names, bool takes_value, const std::string& reason);
  void refused(const std::string& names, bool takes_value, const std::string& reason);
  // Leaves out --json, --color, --progress and --log-dir, for a program that prints text and keeps no files.
  void prints_text() { reports_ = false; }
  // A heading for the following options.
  void section(const std::string& title);

  void positional(std::string& value, const std::string& value_name, const std::string& help, bool required);
  void positionals(std::vector<std::string>& values, const std::string& value_name, const std::string& help,
                   bool required);
  // Options end at the first other word; that word and all following words are stored unchanged.
  void trailing(std::vector<std::string>& words, const std::string& value_name, const std::string& help);
  // -c/--config (--deepspeed_config), --set KEY=VALUE and --strict. `file` may also be a positional.
  void config(std::string& file, std::vector<std::pair<std::string, std::string>>& set, bool& strict);

  // argv[0] is the subcommand's name. Returns false if help or version was printed: return 0. Throws ConfigError.
  bool parse(int argc, char** argv);

  bool given(const std::string& name) const;  // "--num-gpus"
  const Global& global() const { return global_; }
  const std::string& name() const { return name_; }
  // Notices of options without effect; print them once.
  const std::vector<std::string>& notices() const { return notices_; }
  std::string help() const;

 private:
  struct State;
  void add(const std::string& names, const std::string& value_name, const std::string& help, bool repeated,
           bool hidden);
  // Words to options; returns the positionals.
  std::vector<std::string> assign(const std::vector<std::string>& words);
  void set_positionals(const std::vector<std::string>& words);
  std::string name_, summary_, usage_, example_;
  Global global_;
  std::string color_ = "auto", progress_ = "auto";
  bool help_ = false, version_ = false, reports_ = true;
  std::vector<std::string> notices_;
  std::vector<std::string> set_texts_;
  std::vector<std::pair<std::string, std::string>>* set_ = nullptr;
  std::vector<std::string>* trailing_ = nullptr;
  std::unique_ptr<State> state_;
};

}  // namespace zero::cli
