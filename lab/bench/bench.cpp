// `zero bench NAME`: selects the measurement.
#include "lab/bench/bench.h"

#include <cstring>
#include <string>
#include <vector>

#include <zero/version.h>

#include <zero/config_tools.h>
#include "tools/support/console.h"

namespace {

constexpr const char* kHelp = R"(zero bench: measure on this machine

Usage: zero bench NAME [options]

  stages                  memory by phase, time, bytes sent and equal results of
                          ZeRO stages 0 to 3
  step                    time of a step at stages and recipes with ranks as
                          processes, compared with computation alone
  experts                 time and traffic of a step of layers with experts, by
                          expert-parallel ranks
  collectives             time of collectives by size over shared memory and
                          TCP, compared with a plain copy
  optimizer               time of one optimizer update over flat memory,
                          compared with a triad
  activations             the largest batch within a budget of memory, with
                          activations kept, recomputed, and offloaded
  checkpoint              time, memory and bytes of saves, in the background
                          too, and of loads at any number of ranks
  io                      speed of the files of offloaded state, and of fio
  profile                 the speeds of this machine, for zero plan --profile

  -h, --help              this text, or a measurement's
  --version               version of zero

Example
  zero bench stages --world 2 --recipes fp32,bf16
)";

struct Measurement {
  const char* name;
  int (*run)(int, char**);
};
constexpr Measurement kMeasurements[] = {
    {"stages", zero::cli::bench_stages},         {"step", zero::cli::bench_step},
    {"experts", zero::cli::bench_experts},       {"collectives", zero::cli::bench_collectives},
    {"optimizer", zero::cli::bench_optimizer},   {"activations", zero::cli::bench_activations},
    {"checkpoint", zero::cli::bench_checkpoint}, {"io", zero::cli::bench_io},
    {"profile", zero::cli::bench_profile}};

std::string available() {
  std::string names;
  for (const auto& one : kMeasurements) names += std::string(names.empty() ? "" : ", ") + one.name;
  return names;
}

}  // namespace

int zero_bench(int argc, char** argv) {
  using zero::ConfigError;
  static const std::vector<std::string> kNames = {"activations", "collectives", "optimizer", "io",
                                                  "profile",     "step",        "stages"};
  // The name is the first word that is not an option; options before it belong to the measurement.
  std::vector<char*> words(argv + 1, argv + argc);
  std::size_t at = 0;
  for (; at < words.size() && words[at][0] == '-'; ++at) {
    const std::string word = words[at];
    const bool valued = word == "--log-level" || word == "--log_level" || word == "--log-dir" || word == "--log_dir" ||
                        word == "--color" || word == "--progress";
    if (valued) ++at;
  }
  if (at >= words.size()) {
    for (const char* word : words) {
      if (std::strcmp(word, "-h") == 0 || std::strcmp(word, "--help") == 0) return zero::cli::print_result(kHelp), 0;
      if (std::strcmp(word, "--version") == 0) return zero::cli::print_result("zero " ZERO_VERSION "\n"), 0;
    }
    throw ConfigError("[zero bench] got no name, expected one of " + available() + ". Hint: zero bench --help");
  }
  const std::string name = words[at];
  for (const auto& one : kMeasurements) {
    if (name != one.name) continue;
    words.erase(words.begin() + static_cast<std::ptrdiff_t>(at));
    words.insert(words.begin(), const_cast<char*>(one.name));
    words.push_back(nullptr);
    return one.run(static_cast<int>(words.size()) - 1, words.data());
  }
  for (const std::string& known : kNames)
    if (name == known)
      throw ConfigError("[zero bench] got " + name + ", which is not available in this version, expected one of " +
                        available());
  const std::string near = zero::nearest_name(name, kNames);
  throw ConfigError("[zero bench] got \"" + name.substr(0, 80) + "\", expected one of " + available() +
                    (near.empty() ? "" : ". Hint: did you mean " + near + "?"));
}
