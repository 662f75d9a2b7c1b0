// Ranks as processes: starts a program N times with torchrun's variables, collects outputs and exit codes, and leaves
// no processes behind.
#pragma once
#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace zero::test {

struct ProcessResult {
  int exit_code = -1;  // of a normal exit
  int signal = 0;      // that ended it
  std::string out, err;
  std::chrono::milliseconds ended{0};  // after the start of all
  bool timed_out = false;              // killed by us
};

struct SpawnOptions {
  int world = 2;
  std::string transport = "shm";
  int ranks_per_host = 0;          // simulated hosts of this many ranks each; 0: one host
  double timeout_s = 20;           // ZERO_TIMEOUT_S of the ranks
  std::chrono::seconds limit{90};  // then everything left is killed
  int sleeper = -1;                // a rank that never ends; killed after all others have ended
  std::map<std::string, std::string> environment;
};

std::vector<ProcessResult> spawn_ranks(const SpawnOptions& options, const std::string& program,
                                       const std::vector<std::string>& arguments);

}  // namespace zero::test
