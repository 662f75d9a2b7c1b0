// Ranks of a measurement as processes of this program, started and looked after by the launcher. What
// rank 0 measured comes back as one JSON document; the ranks' other lines go to stderr. Knows
// nothing of what is measured.
#pragma once
#include <cstdint>
#include <string>

#include "cli/support/console.h"
#include "cli/support/measurement.h"

namespace zero::cli {

struct RankProcesses {
  std::string command;  // "bench step": for messages; its ranks run "bench step-rank"
  std::int64_t world = 2, threads = 1;
  std::string transport = "shm";
};

struct RankOutcome {
  int exit_code = 0;  // 0, or the launcher's (docs/cli.md section 3); the reason was shown
  Json result;        // what rank 0 handed over
};

// Blocks until all ranks are gone. They are given `task`. Call it from the main thread. Throws
// InternalError when rank 0 ended well without a result.
RankOutcome run_rank_processes(const RankProcesses& ranks, const Json& task, const Global& global);

// In a rank: its arguments after the word, "TASK DESCRIPTOR".
struct RankTask {
  Json task;
  int result_fd = -1;
  // Throws ConfigError for other arguments: a person started it.
  static RankTask from(const std::string& word, int argc, char** argv);
  // Rank 0 hands its result over. Throws IoError.
  void hand_over(const Json& result) const;
};

}  // namespace zero::cli
