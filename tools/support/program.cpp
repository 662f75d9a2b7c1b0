// Selects one of a program's commands.
#include "tools/support/program.h"

#include <string>

#include "base/standard_streams.h"
#include "tools/support/console.h"

namespace zero::cli {

int run_program(const char* program, std::initializer_list<Subcommand> commands, int argc, char** argv) {
  base::fill_standard_streams();  // before anything opens a file
  const std::string word = argc > 1 ? argv[1] : "";
  return guarded(word, [&] {
    std::string names;
    for (const auto& command : commands) {
      if (word == command.name) return command.run(argc - 1, argv + 1);
      if (!std::string(command.name).ends_with("-rank"))
        names += (names.empty() ? "" : ", ") + std::string(command.name);
    }
    throw ConfigError(std::string("[") + program + "] got \"" + word.substr(0, 80) + "\", expected one of " + names +
                      ". Hint: start `zero`, not this program.");
  });
}

}  // namespace zero::cli
