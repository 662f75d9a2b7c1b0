// The summary of a trace (include/zero/trace.h) for programs and for people.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include <zero/trace.h>

namespace zero::cli {

// {"file", "joined", "steps", "step_s", ..., "hidden_share"}
nlohmann::json trace_json(const TraceSummary& trace);
// One line of times, if there are any, and one that names the file.
std::vector<std::string> trace_lines(const TraceSummary& trace);

}  // namespace zero::cli
