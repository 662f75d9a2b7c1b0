// The ranks of another host, through an agent there: a child process (ssh, srun, mpirun) whose stdin and stdout are the
// connection. If the connection closes or is silent for too long, the ranks count as lost, and the agent ends them.
// Private to the launcher.
#pragma once
#include <sys/types.h>

#include <deque>
#include <string>
#include <vector>

#include "base/fd.h"
#include "tools/launch/local/line_splitter.h"
#include "tools/launch/remote/protocol.h"
#include "tools/launch/remote/remote_shell.h"
#include "tools/launch/supervise/host_plan.h"
#include "tools/launch/supervise/host_ranks.h"

namespace zero::launch {

class RemoteRanks final : public HostRanks {
 public:
  // Starts the connection and sends the plan. silence_s: seconds without data after which each side considers the other
  // lost. Throws ConfigError if the program does not exist.
  RemoteRanks(HostPlan plan, const RemoteShell& shell, double silence_s, RankObserver& observer);
  ~RemoteRanks() override;  // closes the connection

  pid_t connection() const { return child_; }

  int first_rank() const override { return plan_.first_rank; }
  int ranks() const override { return plan_.ranks; }
  std::string host() const override { return plan_.name; }
  int fd() const override { return epoll_.get(); }
  bool ready() override { return ready_; }
  void start() override;
  void step() override;
  void listen(bool lines) override;
  void tick() override;
  void send(int signal) override;
  void note_failed(int rank) override;
  void abandon(const std::string& why) override { lose(why); }
  void begin_end() override;
  void finish_end(double seconds) override;
  pid_t pid(int rank) const override { return at(rank).pid; }
  observe::StatusSnapshot page(int rank) const override { return at(rank).page; }
  observe::StatusSnapshot page_at_failure(int rank) const override;
  char state(int rank) const override { return at(rank).state; }
  bool out_of_memory() const override { return out_of_memory_; }

 private:
  struct Rank {
    pid_t pid = -1;
    bool dead = false, kept_known = false;
    char state = '?';
    observe::StatusSnapshot page, kept;
  };
  const Rank& at(int rank) const { return ranks_[static_cast<std::size_t>(rank - first_rank())]; }
  Rank& local(std::int64_t index);
  void put(FrameKind kind, std::string_view payload = {});
  void flush();
  void read_frames();
  void read_errors();
  void take(const Frame& frame);
  // Whether the connection's program has ended; end_text_ then describes how.
  bool child_ended();
  // Waits briefly for that, because its streams close first, and returns end_text_.
  std::string end_of_connection();
  void lose_connection();
  void lose(const std::string& why);
  [[noreturn]] void fail_to_reach(const std::string& why);

  HostPlan plan_;
  std::string program_, agent_path_;
  double silence_s_;
  RankObserver& observer_;
  pid_t child_ = -1;
  base::Descriptor epoll_, in_, out_, err_;
  std::string to_send_;
  FrameReader frames_;
  std::string before_mark_;  // stdout before the agent's first line
  bool marked_ = false, greeted_ = false, ready_ = false, started_ = false, finished_ = false, gone_ = false;
  bool out_of_memory_ = false;
  double began_ = 0, heard_ = 0, said_ = 0, ticked_ = 0, child_ended_at_ = -1;
  std::string end_text_;
  LineSplitter errors_;
  std::deque<std::string> last_errors_;
  std::vector<Rank> ranks_;
};

}  // namespace zero::launch
