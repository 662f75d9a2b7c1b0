// `zero config`.
#include <string>

#include "cli/commands.h"
#include "cli/config_check.h"
#include "cli/console.h"

namespace zero::cli {
void check_config(const std::string& file, const std::vector<std::pair<std::string, std::string>>&, bool) {
  throw ConfigError("[--config] got " + file + ", expected no configuration: it is not available in this version");
}
}  // namespace zero::cli

int zero_config(int, char**) {
  throw zero::ConfigError("[zero config] got a subcommand that is not available in this version, expected one of `zero --help`");
}
