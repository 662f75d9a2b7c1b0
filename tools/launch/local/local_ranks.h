// The ranks of this host as child processes: starts, reads, signals and reaps them, including their descendants. Ranks
// remain zombies until their process groups have been killed, so that process ids are not reused. Private to the
// launcher and its agent.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "observe/status_page.h"
#include "tools/launch/local/death_watch.h"
#include "tools/launch/local/line_splitter.h"
#include "tools/launch/local/orphan_reaper.h"
#include "tools/launch/supervise/host_plan.h"
#include "tools/launch/supervise/host_ranks.h"

namespace zero::launch {

class LocalRanks final : public HostRanks {
 public:
  // Call this and start() on the main thread: the ranks' parent-death signal is tied to it. `strangers`: the children
  // that this process had before it started any, which it kept over exec (`sh -c 'logger & exec zero run ...'`). They
  // and what they start are left alone.
  LocalRanks(PreparedHost host, RankObserver& observer, std::vector<pid_t> strangers);
  ~LocalRanks() override;  // kills the remaining processes
  // Excludes a child of this process from the cleanup of the ranks' descendants.
  void spare(pid_t child) { spared_.push_back(child); }

  int first_rank() const override { return host_.plan().first_rank; }
  int ranks() const override { return host_.plan().ranks; }
  std::string host() const override;
  int fd() const override { return epoll_.get(); }
  bool ready() override { return true; }
  void start() override;
  void step() override;
  void listen(bool lines) override;
  void tick() override { reap_orphans(); }
  void send(int signal) override;
  void note_failed(int rank) override;
  void abandon(const std::string&) override {}
  void begin_end() override;
  void finish_end(double seconds) override;
  pid_t pid(int rank) const override { return at(rank).pid; }
  observe::StatusSnapshot page(int rank) const override { return status_.read(rank - first_rank()); }
  observe::StatusSnapshot page_at_failure(int rank) const override;
  char state(int rank) const override;
  bool out_of_memory() const override;

 private:
  struct Pipe {
    base::Descriptor fd;
    LineSplitter splitter;
  };
  struct Rank {
    pid_t pid = -1;
    Pipe pipes[2];
  };

  const Rank& at(int rank) const { return ranks_[static_cast<std::size_t>(rank - first_rank())]; }
  void start_rank(int index);
  void read_pipe(int index, Stream stream, bool all);
  void see_deaths();
  void reap_orphans();
  bool is_ours(pid_t child) const;

  PreparedHost host_;
  RankObserver& observer_;
  observe::StatusMemory status_;
  std::vector<observe::StatusSnapshot> kept_;  // the pages at the time of the failure
  std::unique_ptr<OrphanReaper> guardian_;
  DeathWatch deaths_;
  base::Descriptor epoll_, pipe_epoll_;
  bool listening_ = true;
  std::vector<Rank> ranks_;
  std::vector<pid_t> spared_, strangers_;
  const bool had_strangers_;
  std::uint64_t oom_before_ = 0;
  bool ended_ = false;
};

}  // namespace zero::launch
