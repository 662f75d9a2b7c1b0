// Files with one JSON object a line, as a run writes them while it trains.
#pragma once
#include <filesystem>
#include <functional>
#include <string>

namespace zero::report {

// Calls take(line) for every complete line of `text`, the contents of `path`; an unfinished last line, as a killed run
// leaves it, is dropped. What `take` throws becomes a ConfigError with file and line. expected: "one step".
void for_each_line(const std::filesystem::path& path, const std::string& text, const std::string& expected,
                   const std::function<void(const std::string& line)>& take);

// The error text of nlohmann::json without its prefix.
std::string plain_fault(const std::string& what);

}  // namespace zero::report
