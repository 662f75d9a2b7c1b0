// One attempt of a job, from the start of its ranks to the end of the last one, on all hosts. The event loop for
// deaths, signals, lines and deadlines; failure.h interprets them. Private to the launcher.
#pragma once
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "tools/launch/supervise/failure.h"
#include "tools/launch/supervise/host_plan.h"
#include "tools/launch/supervise/host_ranks.h"
#include "tools/launch/supervise/launcher.h"
#include "tools/launch/supervise/log_folder.h"

namespace zero::launch {

struct AttemptResult {
  int exit_code = 0;
  bool asked_to_stop = false;  // by a signal to the launcher: never restarted
  std::optional<FailureReport> failure;
  bool disk_full = false;
  bool uses_libzero = true;  // the rank that failed has opened its status page
  std::uint64_t commits = 0;
  HostFault fault;
  std::optional<base::WorldRule> rule;  // as the ranks published it
};

class RunAttempt final : private RankObserver {
 public:
  // signals: a signalfd of the four signals. plans: one per host of this launcher, in rank order; their ranks are
  // consecutive.
  RunAttempt(const LaunchSettings& settings, LaunchSink& sink, int signals, std::vector<HostPlan> plans);
  ~RunAttempt() override;  // kills remaining processes if run() threw
  AttemptResult run();

 private:
  enum class State { Running, Settling, Stopping, Saving, Interrupted };
  struct Rank {
    HostRanks* host = nullptr;
    bool dead = false;
    base::Descriptor log[2];
    std::deque<std::string> tail[2];
    std::vector<int> sent;  // signals
    std::uint64_t changes = 0;
    double changed_at = 0;
  };

  void line(int rank, Stream stream, std::string_view text) override;
  void died(int rank, bool by_signal, int code) override;
  void lost(int rank, const std::string& why) override;
  void notice(LogLevel level, std::string_view text) override { sink_.notice(level, text); }

  double now() const;
  int count() const { return static_cast<int>(ranks_.size()); }
  Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank - base_)]; }
  observe::StatusSnapshot page(int index) const;
  void connect();
  bool reaches_hosts();
  bool wait_until_ready();
  void open_logs();
  void wait_for_events();
  void see_death(Death death);
  void see_signals();
  void see_time();
  void check_progress();
  void send(int signal);
  void begin_stop(double kill_after_s);
  void note_failure();
  void end_everything();
  AttemptResult judge();
  FailureReport report();
  void write_rings() const;

  const LaunchSettings& settings_;
  LaunchSink& sink_;
  int signals_;
  std::vector<HostPlan> plans_;
  int base_ = 0;  // number of the first rank
  double began_ = 0;
  base::Descriptor epoll_;
  std::optional<LogFolder> logs_;
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<HostRanks>> hosts_;  // as plans_
  bool lines_wanted_ = true;
  std::size_t attended_ = 0;  // the host whose events are handled
  std::string unreachable_;   // why that host cannot be used
  int alive_ = 0;
  bool ended_ = false;

  State state_ = State::Running;
  std::vector<Death> order_;
  std::optional<Hang> hang_;
  bool failed_ = false;
  std::string failure_time_;
  double settle_until_ = 0, kill_at_ = -1, killed_at_ = -1, next_check_ = 0, looked_at_ = 0;
  int stop_signal_ = 0;  // the first signal to the launcher
  bool killed_saves_ = false;
  bool forced_ = false;  // a second signal
};

}  // namespace zero::launch
