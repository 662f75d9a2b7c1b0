// One attempt of a job: its ranks from the first fork to the last reaped process. The event loop of
// deaths, signals, pipes and deadlines; judged by failure.h. Private to the launcher.
#pragma once
#include <sys/types.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status_page.h"
#include "launch/death_watch.h"
#include "launch/failure.h"
#include "launch/guardian.h"
#include "launch/launcher.h"
#include "launch/line_splitter.h"

namespace zero::launch {

// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();
  int get() const { return fd_; }
  int release();

 private:
  int fd_;
};

struct AttemptResult {
  int exit_code = 0;
  bool asked_to_stop = false;            // by a signal to the launcher: never restarted
  std::optional<FailureReport> failure;
  bool disk_full = false;
  std::uint64_t commits = 0;
};

class Attempt {
 public:
  // `signals` is a signalfd of the four signals. `path` is the resolved program.
  Attempt(const LaunchSettings& settings, LaunchSink& sink, int signals, std::string run_id, std::string path,
          std::vector<std::string> common_environment, int number);
  ~Attempt();  // kills what is left, if run() threw
  AttemptResult run();

 private:
  enum class State { Running, Settling, Stopping, Saving, Interrupted };
  struct Pipe {
    Descriptor fd, log;
    LineSplitter splitter;
    std::deque<std::string> tail;
  };
  struct Rank {
    pid_t pid = -1;
    bool dead = false;
    Pipe pipes[2];
    std::vector<int> sent;  // signals
    std::uint64_t changes = 0;
    double changed_at = 0;
  };

  double now() const;
  void start_rank(int index);
  std::vector<std::string> environment_of(int index) const;
  void wait_for_events();
  void read_pipe(int index, Stream stream, bool all);
  void emit(int index, Stream stream, std::string_view line);
  void see_deaths();
  void see_signals();
  void see_time();
  void check_progress();
  void reap_orphans();
  void send(int signal);
  void begin_stop(double kill_after_s);
  void note_failure();
  void end_everything();
  AttemptResult judge();
  void write_rings() const;

  const LaunchSettings& settings_;
  LaunchSink& sink_;
  int signals_;
  std::string run_id_, path_;
  std::vector<std::string> common_environment_;
  int number_;
  int port_ = 0;
  double began_ = 0;
  std::uint64_t oom_before_ = 0;

  base::StatusMemory status_;
  std::unique_ptr<Guardian> guardian_;
  DeathWatch deaths_;
  Descriptor epoll_, pipe_epoll_;
  bool pipes_watched_ = true;
  std::vector<Rank> ranks_;
  int alive_ = 0;
  bool ended_ = false;

  State state_ = State::Running;
  std::vector<Death> order_;
  std::optional<Hang> hang_;
  std::vector<base::StatusSnapshot> pages_at_failure_;
  std::string failure_time_;
  double settle_until_ = 0, kill_at_ = -1, next_check_ = 0;
  int stop_signal_ = 0;    // first signal to the launcher
  bool killed_saves_ = false;
  bool forced_ = false;    // a second signal
};

}  // namespace zero::launch
