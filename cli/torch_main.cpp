// `zero-torch`: the subcommands that need libtorch. `zero` replaces itself by it and passes the words after "zero". A
// subcommand that this build lacks is rejected by name.
#include <string>

#include "base/standard_streams.h"
#include "cli/commands.h"
#include "cli/support/console.h"

int main(int argc, char** argv) {
  zero::base::fill_standard_streams();  // before anything opens a file
  const std::string word = argc > 1 ? argv[1] : "";
  return zero::cli::guarded(word, [&] {
    struct Entry {
      const char* name;
      int (*run)(int, char**);
    };
    const Entry entries[] = {{"train", zero_train},
                             {"bench", zero_bench},
                             {"checkpoint", zero_checkpoint},
                             {"explain", zero_explain},
                             {"plan", zero_plan}};
    for (const Entry& entry : entries) {
      if (word != entry.name) continue;
      if (entry.run) return entry.run(argc - 1, argv + 1);
      throw zero::ConfigError(
          "[zero " + word + "] got a subcommand that is not available in this version, expected one of `zero --help`");
    }
    throw zero::ConfigError(
        "[zero-torch] got \"" + word.substr(0, 80) +
        "\", expected train, bench, checkpoint, explain or plan. Hint: start `zero`, not this program.");
  });
}
