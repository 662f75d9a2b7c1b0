// Runs the ranks of a measurement as processes of this program, supervised by the launcher. Rank 0 returns its result
// as one JSON document; other lines of the ranks go to stderr. Independent of the measurement.
#pragma once
#include <cstdint>
#include <string>

#include "tools/support/console.h"
#include "tools/support/measurement.h"

namespace zero::cli {

struct RankProcesses {
  std::string command;  // "bench step": for messages; its ranks are "step-rank" of the same program
  std::int64_t world = 2, threads = 1;
  std::string transport = "shm";
};

struct RankOutcome {
  int exit_code = 0;  // 0, or the launcher's (docs/cli.md section 3); its cause was printed
  Json result;        // from rank 0
};

// Passes `task` to the ranks and blocks until all have ended. Call from the main thread. Throws InternalError if rank 0
// succeeded without a result.
RankOutcome run_rank_processes(const RankProcesses& ranks, const Json& task, const Global& global);

// In a rank: the arguments after the name, "TASK DESCRIPTOR".
struct RankTask {
  Json task;
  int result_fd = -1;
  // Throws ConfigError for other arguments, for example if started by hand.
  static RankTask from(const std::string& word, int argc, char** argv);
  // Returns rank 0's result. Throws IoError.
  void hand_over(const Json& result) const;
};

}  // namespace zero::cli
