// Which rank failed first, why the others fell, and how that is told: pure judgement over deaths
// and status pages, and its two spellings (block of text, JSON). Starts and kills nothing.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "observe/status_page.h"

namespace zero::launch {

// A rank's end, in order of death.
struct Death {
  int rank = 0;
  bool by_signal = false;
  int code = 0;             // exit code, or the signal
  double at = 0;            // seconds since the attempt began
  bool after_stop = false;  // the launcher had begun to end the job
  bool sent = false;        // ... and had itself sent the signal that ended it
  std::string lost;         // why its end is not known; empty: it was seen
};

struct Hang {
  int rank = -1;  // -1: all are inside the same collective, the link is to blame
  double idle_seconds = 0;
  std::string detail;  // "stopped (SIGSTOP)", "waiting for a disk"
};

// Looks for a rank that makes no progress. `idle` is seconds since each live rank's page changed,
// negative for ranks that have ended; `states` their letters in /proc ('T' stopped, 'D' waiting for a
// device), empty when unknown. `slow_limit` is the limit for start-up, load and save.
std::optional<Hang> find_hang(const std::vector<observe::StatusSnapshot>& pages, const std::vector<double>& idle,
                              double limit, double slow_limit, std::string_view states = {});

// Two ranks that called different collectives under one sequence number; empty: none did.
// `first_rank` is the number of the first page's rank.
std::string find_desync(const std::vector<observe::StatusSnapshot>& pages, int first_rank = 0);

struct FailureReport {
  std::string run_id, host;
  int ranks = 0;  // of the world
  int hosts = 1;
  int exit_code = 1;  // what the launcher passes on
  int attempt = 0;    // 0: the first
  int rank = -1;      // root cause; -1: the link
  int pid = 0;
  std::string cause;  // "killed by signal 9 (SIGKILL); the kernel ended it for lack of memory"
  int signal = 0;     // of the root cause, 0: none
  std::optional<int> rank_exit_code;
  bool out_of_memory = false;
  std::string error;  // the rank's own last error text
  // Where it was; a step of -1 is unknown.
  std::int64_t step = -1;
  int micro_batch = 0;
  std::string phase, unit, time;
  std::string desync;
  struct Collective {
    observe::CollectiveSnapshot what;
    std::vector<int> inside, outside;
  };
  std::optional<Collective> collective;
  std::vector<int> lost_peer, stopped;     // collateral: exit 6 or aborted in a collective; ended by us
  double first_after = 0, last_after = 0;  // seconds from the root cause to the collateral's ends
  std::string log_path;
  std::vector<std::string> last_lines;  // of the root cause's stderr (or stdout), printed above the block
  std::string hint;
};

// Ranks of deaths, pages, and hang count from 0, for the first rank that this launcher looks after.
struct Evidence {
  std::vector<std::string> hosts;  // of each rank
  int first_rank = 0, world = 0;   // of the ranks that this launcher looks after; 0: they are all
  std::vector<int> pids;
  std::vector<Death> deaths;                   // failures and others, in order of death
  std::vector<observe::StatusSnapshot> pages;  // as they were when the first failure was seen
  std::optional<Hang> hang;
  std::vector<bool> out_of_memory;  // the kernel's count rose on the rank's host; empty: nowhere
  std::string time;
};

// Judges by the rules of docs/cli.md "first failure". At least one death must be a failure, or
// `hang` be set: InternalError else.
FailureReport find_root_cause(const Evidence& evidence);

// What a rank's end means as an exit code of the launcher: 1..125 as they are, signals 6.
int exit_code_of(const Death& death);
bool is_failure(const Death& death);  // neither 0 nor 75
std::string signal_name(int signal);  // "SIGKILL"

// The root-cause block, lines ending in '\n', at most a few lines longer than the terminal is wide.
std::string failure_text(const FailureReport& report);
// The same fields as a JSON object, one line, no newline.
std::string failure_json(const FailureReport& report);

}  // namespace zero::launch
