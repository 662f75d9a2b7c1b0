// `zero run`: starts the ranks of any program on this and other hosts, supervises them, finds the first failure and
// ends all processes. Prints nothing: lines, notices and reports go to a sink. Call from the main thread of a process
// without its own signal handlers.
#pragma once
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <zero/log.h>

#include "base/fd.h"
#include "tools/launch/remote/remote_shell.h"
#include "tools/launch/supervise/failure.h"
#include "tools/launch/supervise/host_plan.h"
#include "tools/launch/supervise/host_ranks.h"
#include "tools/launch/supervise/job_hosts.h"

namespace zero::launch {

struct AttemptResult;

struct LaunchSettings {
  std::vector<std::string> program;  // [0] is looked up in PATH unless it has a slash
  std::vector<LaunchHost> hosts;     // in the order of their ranks; at least one
  int by_hand = -1;                  // start only this one of `hosts`; the others have their own launchers
  bool bind_cores = false;
  std::string core_list;  // "0,2-5": the cores to bind to
  std::string master_address = "127.0.0.1";
  int master_port = 0;                // 0: a free one; required with several hosts
  RemoteShell shell;                  // for hosts other than this one
  std::vector<std::string> exported;  // further variables to pass to them, besides those of environment_for_others
  double host_timeout_s = 30;         // silence of another host after which it counts as lost
  std::filesystem::path log_folder;   // empty: no files
  std::map<std::string, std::string> environment;  // added to every rank's
  bool pass_local_rank = false;
  double grace_s = 3, stop_timeout_s = 600, hang_timeout_s = 600;
  double slow_timeout_s = 3600;  // limit during start-up, load and save; at least hang_timeout_s
  int max_restarts = 0;
  // Restarts leave out a lost host, and a slot that failed twice in a row, and continue with at least so many ranks
  // and hosts. 0: with all of them.
  int min_ranks = 0, min_hosts = 1;
};

// Receives all output. Called on the launcher's thread only; must not block for long.
class LaunchSink {
 public:
  virtual ~LaunchSink() = default;
  // Before each attempt: where its ranks are, in their order.
  virtual void placed(const std::vector<LaunchHost>&) {}
  virtual void line(int rank, Stream stream, std::string_view text) = 0;  // one line, no newline
  virtual void notice(LogLevel level, std::string_view text) = 0;
  // After the last line of a failed attempt.
  virtual void failed(const FailureReport& report) = 0;
  // Writes buffered data without blocking; false if some remains.
  virtual bool pump() = 0;
  // Whether so much is buffered that ranks should wait.
  virtual bool full() const = 0;
  // 0, or the errno of a failed write to stdout (EPIPE: its reader has closed it).
  virtual int out_error() const = 0;
};

struct Restart {
  int ranks = 0, was = 0;  // of the new attempt and of the one before
  std::string left_out;    // "slot 2 died twice"; empty: nothing
};

struct LaunchResult {
  int exit_code = 0;
  std::string run_id;
  int attempts = 0;
  int ranks = 0;  // of the last attempt
  std::vector<Restart> restarts;
  double seconds = 0;
};

class Launcher {
 public:
  // Checks the program, cores and log folder without starting anything. Throws ConfigError or IoError.
  Launcher(LaunchSettings settings, LaunchSink& sink);

  const std::string& run_id() const { return run_id_; }
  int omp_threads() const { return omp_threads_; }  // of this host's ranks; 0: OMP_NUM_THREADS is already set
  int ranks() const { return hosts_.ranks(); }      // of the world

  // Blocks until all ranks and their descendants have ended. Handles SIGINT, SIGTERM, SIGUSR1, SIGHUP (docs/cli.md
  // section 8) and leaves them blocked. The exit code is defined in section 3 there.
  LaunchResult run();

 private:
  void agree_on_names();
  std::vector<HostPlan> plans(const std::string& run_id, int attempt, int previous_world) const;
  std::string master_address() const;
  void make_kept_memory();
  // Chooses the hosts of the next attempt, tells what changes, and waits; false: there is no next attempt.
  bool prepare_restart(const AttemptResult& failed, int signals, LaunchResult& result);
  bool waits(double seconds, int signals, LaunchResult& result);

  LaunchSettings settings_;
  LaunchSink& sink_;
  JobHosts hosts_;
  std::optional<base::WorldRule> rule_;  // of the program's configuration, once a rank has published it
  std::string run_id_, token_;
  bool makes_token_ = false;  // a secret of its own for every attempt
  std::map<std::string, std::string> others_environment_;
  std::vector<base::Descriptor> kept_;  // one per rank of this host, for all attempts with as many; empty: none
  int omp_threads_ = 0;
  std::int64_t failed_step_ = -1;  // of the last failure
  int fruitless_ = 0;              // failures in a row without a new checkpoint, on the same hosts
};

}  // namespace zero::launch
