// Finds the rank that failed first and the reason why the others ended, from exits of processes and status pages, and
// prints the result as text or JSON. Pure functions: nothing is started or killed.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "observe/status_page.h"

namespace zero::launch {

// The end of a rank's process.
struct Death {
  int rank = 0;
  bool by_signal = false;
  int code = 0;             // exit code, or the signal
  double at = 0;            // seconds since the attempt began
  bool after_stop = false;  // the launcher had begun to stop the job
  bool sent = false;        // ... and had itself sent the signal that ended it
  std::string lost;         // why the exit status is unknown; empty: it is known
};

struct Hang {
  int rank = -1;  // -1: all ranks are inside the same collective, so the network is the likely cause
  double idle_seconds = 0;
  std::string detail;  // "the process is stopped (SIGSTOP or a debugger)"
};

// Finds a rank that makes no progress. `idle`: seconds since each rank's page changed, negative for ranks that have
// ended. `states`: process states as in /proc ('T' stopped, 'D' waiting for a device), empty if unknown.
// `slow_limit`: the limit for start-up, load and save.
std::optional<Hang> find_hang(const std::vector<observe::StatusSnapshot>& pages, const std::vector<double>& idle,
                              double limit, double slow_limit, std::string_view states = {});

// Describes two ranks that called different collectives with the same sequence number; empty: there are none.
// `first_rank`: the rank of the first page.
std::string find_desync(const std::vector<observe::StatusSnapshot>& pages, int first_rank = 0);

struct FailureReport {
  std::string run_id, host;
  int ranks = 0;  // of the world
  int hosts = 1;
  int exit_code = 1;  // of the launcher
  int attempt = 0;    // 0: the first
  int rank = -1;      // the root cause; -1: the network
  int pid = 0;
  std::string cause;  // "killed by signal 9 (SIGKILL); the kernel killed it because memory ran out"
  int signal = 0;     // of the root cause, 0: none
  std::optional<int> rank_exit_code;
  bool out_of_memory = false;
  std::string error;  // the rank's last error text
  // Its position in the run; step -1: unknown.
  std::int64_t step = -1;
  int micro_batch = 0;
  std::string phase, unit, time;
  // The checkpoint that it was writing in the background; empty: none.
  std::string save;
  std::uint64_t save_written = 0, save_bytes = 0;
  std::string desync;
  struct Collective {
    observe::CollectiveSnapshot what;
    std::vector<int> inside, outside;
  };
  std::optional<Collective> collective;
  std::vector<int> lost_peer, stopped;     // collateral: exit 6 or aborted in a collective; ended by the launcher
  double first_after = 0, last_after = 0;  // seconds from the root cause to the first and last collateral end
  std::string log_path;
  std::vector<std::string> last_lines;  // of the failed rank's stderr (or stdout), printed above the failure block
  std::string hint;
};

// Ranks in deaths, pages and hang are relative to the first rank of this launcher.
struct Evidence {
  std::vector<std::string> hosts;  // of each rank
  int first_rank = 0, world = 0;   // first rank of this launcher; world size, 0: this launcher has all ranks
  std::vector<int> pids;
  std::vector<Death> deaths;                   // of failed and other ranks, in order of time
  std::vector<observe::StatusSnapshot> pages;  // when the first failure was detected
  std::optional<Hang> hang;
  std::vector<bool> out_of_memory;  // the kernel's OOM-kill count of the rank's host rose; empty: on no host
  std::string time;
};

// Applies the rules of docs/cli.md "first failure". InternalError unless a death is a failure or `hang` is set.
FailureReport find_root_cause(const Evidence& evidence);

// The launcher's exit code for a rank's end: 1..125 are unchanged, signals become 6.
int exit_code_of(const Death& death);
bool is_failure(const Death& death);  // neither 0 nor 75
std::string signal_name(int signal);  // "SIGKILL"

// The root-cause block, lines ending in '\n'. A few lines may be longer than the terminal is wide.
std::string failure_text(const FailureReport& report);
// The same fields as a JSON object, one line, no newline.
std::string failure_json(const FailureReport& report);

}  // namespace zero::launch
