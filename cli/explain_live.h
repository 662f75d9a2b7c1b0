// The ranks that `zero explain --live` starts, as threads or processes, for live_steps.h. Who compares and prints what
// they did is explain.cpp.
#pragma once
#include "cli/console.h"
#include "cli/live_steps.h"

namespace zero::cli {

// Weak: `zero` alone cannot train. Throws the library's errors; InternalError with the exit code of ranks that failed.
[[gnu::weak]] LiveRun run_live(const LiveTask& task, const Global& global);

}  // namespace zero::cli
