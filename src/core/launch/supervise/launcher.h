// `zero run`: starts the ranks of any program on this host and others, looks after them, names the one
// that failed first and leaves none behind. Prints nothing: lines, notices and reports go to a sink.
// Call it from the main thread of a process that has not installed signal handlers of its own.
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
  std::string name;        // as in the hostfile; shown, and given to ssh
  std::vector<int> slots;  // one rank each; of GPUs where the host has some
  bool here = true;        // this host
};

struct LaunchSettings {
  std::vector<std::string> program;  // [0] is looked up in PATH unless it has a slash
  std::vector<LaunchHost> hosts;     // in the order of their ranks; at least one
  int by_hand = -1;                  // only this one of `hosts` is started: the others have launchers of their own
  bool bind_cores = false;
  std::string core_list;  // "0,2-5": the cores to bind to
  std::string master_address = "127.0.0.1";
  int master_port = 0;                // 0: a free one; several hosts need a number
  RemoteShell shell;                  // of the hosts that are not here
  std::vector<std::string> exported;  // variables of ours that they get, beside those of environment_for_others
  double host_timeout_s = 30;         // silence of another host that means it is lost
  std::filesystem::path log_folder;   // empty: no files
  std::map<std::string, std::string> environment;  // added to every rank's
  bool pass_local_rank = false;
  double grace_s = 3, stop_timeout_s = 600, hang_timeout_s = 600;
  double slow_timeout_s = 3600;  // silence allowed in start-up, load and save; at least hang_timeout_s
  int max_restarts = 0;
};

// Where everything goes. Called on the launcher's thread only; must not block for long.
class LaunchSink {
 public:
  virtual ~LaunchSink() = default;
  virtual void line(int rank, Stream stream, std::string_view text) = 0;  // one line, no newline
  virtual void notice(LogLevel level, std::string_view text) = 0;
  // After the last line of a failed attempt.
  virtual void failed(const FailureReport& report) = 0;
  // Writes on what it holds, without waiting; false while something is left.
  virtual bool pump() = 0;
  // It holds so much that ranks should wait.
  virtual bool full() const = 0;
  // 0, or the errno with which stdout failed (EPIPE: its reader is gone).
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
  // Checks all that can be checked here without starting anything: the program, cores, the log folder.
  // Throws ConfigError or IoError.
  Launcher(LaunchSettings settings, LaunchSink& sink);

  const std::string& run_id() const { return run_id_; }
  int omp_threads() const { return omp_threads_; }  // of this host's ranks; 0: OMP_NUM_THREADS was set already
  int ranks() const;                                // of the world

  // Blocks until all ranks, and all they started, are gone. Takes SIGINT, SIGTERM, SIGUSR1, SIGHUP
  // (docs/cli.md section 8) and leaves them blocked. Exit code as in section 3 there.
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
