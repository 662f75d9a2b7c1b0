// The ranks that `zero explain --live` starts, as threads or processes, for live_steps.h. Who compares and prints what
// they did is explain.cpp.
#pragma once
#include "cli/explain/live_steps.h"
#include "cli/support/console.h"

namespace zero::cli {

// Weak: `zero` alone cannot train. Throws the library's errors; InternalError with the exit code of ranks that failed.
[[gnu::weak]] LiveRun run_live(const LiveTask& task, const Global& global);

// One of those ranks as a process of its own, as `zero bench explain-rank`.
int explain_rank(int argc, char** argv);

}  // namespace zero::cli
