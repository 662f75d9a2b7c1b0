// The summary of a trace (include/zero/trace.h) as JSON and as text.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include <zero/trace.h>

namespace zero::cli {

// {"file", "joined", "steps", "step_s", ..., "hidden_share"}
nlohmann::json trace_json(const TraceSummary& trace);
// One line with times, if any, and one with the file's name.
std::vector<std::string> trace_lines(const TraceSummary& trace);

}  // namespace zero::cli
