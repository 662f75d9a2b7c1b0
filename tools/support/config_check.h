// Checks a configuration file before anything is started.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace zero::cli {

// Throws ConfigError with all faults; strict: notices count as faults. Notices go to the log sink.
void check_config(const std::string& file, const std::vector<std::pair<std::string, std::string>>& set, bool strict);

}  // namespace zero::cli
