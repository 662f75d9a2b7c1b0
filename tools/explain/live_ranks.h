// Starts the ranks of `zero explain --live`, as threads or processes, and runs live_steps.h on them. explain.cpp
// compares and prints the results.
#pragma once
#include "tools/explain/live_steps.h"
#include "tools/support/console.h"

namespace zero::cli {

// Weak, because `zero` without libtorch cannot train. Throws the library's errors, and InternalError with the exit code
// of failed ranks.
[[gnu::weak]] LiveRun run_live(const LiveTask& task, const Global& global);

// Runs one of these ranks as a process, started as `zero-torch explain-rank`.
int explain_rank(int argc, char** argv);

}  // namespace zero::cli
