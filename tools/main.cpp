// `zero`: selects the subcommand. Those that need torch, or that are no tools, are in other programs of the same
// folder, which replace this process: help, run, config and doctor start without loading libtorch.
#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include <zero/version.h>

#include <zero/config_tools.h>
#include "base/standard_streams.h"
#include "tools/commands.h"
#include "tools/support/console.h"

namespace {

using zero::ConfigError;

constexpr const char* kHelp = R"(zero: sharded data-parallel training for libtorch

Usage: zero SUBCOMMAND [options]

  train CONFIG.json       train a built-in model on your data
  run PROGRAM [ARGS...]   start and supervise ranks of any program
  plan                    estimate memory, traffic and time before a run
  explain stage 0-3       where states are stored and sent in each phase
  report RUN...           a page about finished runs: curves, memory, traffic
  reproduce [NAME...]     the papers' and documents' experiments, measured here
  bench                   measure collectives, optimizer, I/O, steps, stages
  doctor                  check what this machine provides and lacks
  checkpoint              list, read and verify checkpoints
  config                  check, explain, schema, keys
  models                  models with a name, and their config.json

  -h, --help              this text, or a subcommand's
  --version               version of zero

Every subcommand takes -q/--quiet, -v/--verbose, --log-level, --log-dir, --json,
--color and --progress. Exit codes: 0 ok, 1 failed, 2 usage or configuration,
3 checkpoint, 4 out of memory, 5 I/O, 6 a rank died or hung, 7 numerical,
75 stopped with the state saved, 130 and 143 ended by a signal.

Example
  zero run -n 4 ./my_program --epochs 3
)";

// execv keeps the process id, so the parent continues to watch the right process.
[[noreturn]] void continue_as(const std::string& name, const std::vector<std::string>& words) {
  char self[PATH_MAX] = {};
  if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) std::strcpy(self, "zero");
  const std::string here(self);
  const std::string program = here.substr(0, here.rfind('/') + 1) + name;
  std::vector<char*> argv{const_cast<char*>(program.c_str())};
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  execv(program.c_str(), argv.data());
  const int error = errno;
  throw ConfigError("[zero " + words[0] + "] cannot start " + program + ": " + std::strerror(error) +
                    ". Hint: install " + name + ", or build the whole project.");
}

int dispatch(const std::vector<std::string>& words) {
  static const std::vector<std::string> kNames = {"train",  "run",        "plan",   "explain", "report",   "bench",
                                                  "doctor", "checkpoint", "config", "models",  "reproduce"};
  const std::string& word = words[0];
  std::vector<char*> argv;
  for (const std::string& w : words) argv.push_back(const_cast<char*>(w.c_str()));
  argv.push_back(nullptr);
  const int argc = static_cast<int>(words.size());
  if (word == "run") return zero_run(argc, argv.data());
  if (word == "config") return zero_config(argc, argv.data());
  if (word == "doctor") return zero_doctor(argc, argv.data());
  if (word == "report") return zero_report(argc, argv.data());
  if (word == "models") return zero_models(argc, argv.data());
  // Predictions need no libtorch; what is run does.
  const auto has = [&](const char* option) { return std::find(words.begin(), words.end(), option) != words.end(); };
  if (word == "plan" && !has("--measure")) return zero_plan(argc, argv.data());
  if (word == "explain" && !has("--live")) return zero_explain(argc, argv.data());
  if (word == "explain" || word == "plan" || word == "checkpoint") continue_as("zero-torch", words);
  if (word == "train") continue_as("zero-train", words);
  if (word == "bench" || word == "reproduce") continue_as("zero-lab", words);
  const std::string near = zero::nearest_name(word, kNames);
  std::string all;
  for (const std::string& name : kNames) all += (all.empty() ? "" : ", ") + name;
  throw ConfigError("[zero] got an unknown subcommand \"" + word.substr(0, 80) + "\", expected one of " + all +
                    (near.empty() ? "" : ". Hint: did you mean \"" + near + "\"?"));
}

// Moves options before the first word that is not an option behind it.
std::vector<std::string> subcommand_first(int argc, char** argv) {
  std::vector<std::string> before;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.empty() || word[0] != '-') {
      std::vector<std::string> words{word};
      words.insert(words.end(), before.begin(), before.end());
      words.insert(words.end(), argv + i + 1, argv + argc);
      return words;
    }
    before.push_back(word);
    const bool valued = word == "--log-level" || word == "--log_level" || word == "--log-dir" || word == "--log_dir" ||
                        word == "--color" || word == "--progress";
    if (valued && i + 1 < argc) before.push_back(argv[++i]);
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  zero::base::fill_standard_streams();  // before anything opens a file
  const std::vector<std::string> words = subcommand_first(argc, argv);
  return zero::cli::guarded(words.empty() || words[0].empty() ? "" : words[0], [&] {
    if (!words.empty() && words[0] != "help") return dispatch(words);
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      if (word == "--version") {
        zero::cli::print_result("zero " ZERO_VERSION "\n");
        return 0;
      }
      if (word == "-h" || word == "--help" || word == "help") {
        zero::cli::print_result(kHelp);
        return 0;
      }
    }
    throw ConfigError(std::string("[zero] got ") +
                      (argc > 1 ? "\"" + std::string(argv[1]).substr(0, 80) + "\"" : "no word") +
                      ", expected a subcommand. Hint: zero --help");
  });
}
