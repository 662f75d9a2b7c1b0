// `zero run`: starts the ranks of any program on this and other hosts, supervises them, finds the first failure and
// ends all processes. Prints nothing: lines, notices and reports go to a sink. Call from the main thread of a process
// without its own signal handlers.
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <zero/log.h>

#include "launch/remote/remote_shell.h"
#include "launch/supervise/failure.h"
#include "launch/supervise/host_plan.h"
#include "launch/supervise/host_ranks.h"

namespace zero::launch {

struct LaunchHost {
  std::string name;        // as in the hostfile; shown, and passed to ssh
  std::vector<int> slots;  // one rank each; GPU slots if the host has GPUs
  bool here = true;        // whether it is this host
};

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
};

// Receives all output. Called on the launcher's thread only; must not block for long.
class LaunchSink {
 public:
  virtual ~LaunchSink() = default;
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

struct LaunchResult {
  int exit_code = 0;
  std::string run_id;
  int attempts = 0;
  double seconds = 0;
};

class Launcher {
 public:
  // Checks the program, cores and log folder without starting anything. Throws ConfigError or IoError.
  Launcher(LaunchSettings settings, LaunchSink& sink);

  const std::string& run_id() const { return run_id_; }
  int omp_threads() const { return omp_threads_; }  // of this host's ranks; 0: OMP_NUM_THREADS is already set
  int ranks() const;                                // of the world

  // Blocks until all ranks and their descendants have ended. Handles SIGINT, SIGTERM, SIGUSR1, SIGHUP (docs/cli.md
  // section 8) and leaves them blocked. The exit code is defined in section 3 there.
  LaunchResult run();

 private:
  void agree_on_names();
  std::vector<HostPlan> plans(const std::string& run_id, int attempt) const;

  LaunchSettings settings_;
  LaunchSink& sink_;
  std::string run_id_, token_;
  std::map<std::string, std::string> others_environment_;
  int omp_threads_ = 0;
};

}  // namespace zero::launch
