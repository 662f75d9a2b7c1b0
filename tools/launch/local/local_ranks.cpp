// Deaths are reported by a DeathWatch. Lines arrive from pipes in a separate epoll set, so that they can be ignored
// while our output is blocked.
#include "tools/launch/local/local_ranks.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "base/check.h"
#include "base/system.h"
#include "tools/launch/local/process_tree.h"
#include "tools/launch/local/rank_process.h"
#include "tools/launch/machine/host.h"

namespace zero::launch {
namespace {

enum Tag : std::uint64_t { kDeaths, kPipes };

}  // namespace

LocalRanks::LocalRanks(PreparedHost host, RankObserver& observer, std::vector<pid_t> strangers)
    : host_(std::move(host)),
      observer_(observer),
      status_(host_.plan().ranks),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      pipe_epoll_(epoll_create1(EPOLL_CLOEXEC)),
      ranks_(static_cast<std::size_t>(host_.plan().ranks)),
      strangers_(std::move(strangers)),
      had_strangers_(!strangers_.empty()) {
  base::watch(epoll_.get(), deaths_.fd(), kDeaths);
  base::watch(epoll_.get(), pipe_epoll_.get(), kPipes);
  oom_before_ = oom_kill_count();
}

LocalRanks::~LocalRanks() {
  if (ended_) return;
  begin_end();
  finish_end(kSweepSeconds);
}

std::string LocalRanks::host() const { return base::host_name("localhost"); }

void LocalRanks::start_rank(int index) {
  Rank& rank = ranks_[static_cast<std::size_t>(index)];
  SpawnSettings spawned;
  spawned.path = host_.path();
  spawned.arguments = host_.arguments_of(index);
  spawned.environment = host_.environment_of(index, status_.fd());
  spawned.cores = host_.cores_of(index);
  spawned.keep_fds = {status_.fd()};
  if (const int kept = host_.kept_fd(index); kept >= 0) spawned.keep_fds.push_back(kept);
  const SpawnedProcess process = spawn(spawned);
  rank.pid = process.pid;
  guardian_->watch(process.pid);
  deaths_.add(index, process.pid);
  rank.pipes[0].fd = base::Descriptor(process.out);
  rank.pipes[1].fd = base::Descriptor(process.err);
  for (const int s : {0, 1})
    base::watch(pipe_epoll_.get(), rank.pipes[s].fd.get(),
                static_cast<std::uint64_t>(index) * 2 + static_cast<std::uint64_t>(s));
}

void LocalRanks::start() {
  guardian_ = std::make_unique<OrphanReaper>(host_.marks());
  for (int i = 0; i < ranks(); ++i) start_rank(i);
}

void LocalRanks::step() {
  if (listening_) {
    epoll_event pipes[64];
    const int count = epoll_wait(pipe_epoll_.get(), pipes, 64, 0);
    for (int k = 0; k < count; ++k)
      read_pipe(static_cast<int>(pipes[k].data.u64 / 2), static_cast<Stream>(pipes[k].data.u64 % 2), false);
  }
  see_deaths();
}

void LocalRanks::listen(bool lines) {
  if (lines == listening_) return;
  if (lines) {
    base::watch(epoll_.get(), pipe_epoll_.get(), kPipes);
  } else {
    base::unwatch(epoll_.get(), pipe_epoll_.get());
  }
  listening_ = lines;
}

void LocalRanks::read_pipe(int index, Stream stream, bool all) {
  Pipe& pipe = ranks_[static_cast<std::size_t>(index)].pipes[static_cast<int>(stream)];
  const auto take = [&](std::string_view line) { observer_.line(first_rank() + index, stream, line); };
  char bytes[64 * 1024];
  while (pipe.fd.get() >= 0) {
    const ssize_t n = ::read(pipe.fd.get(), bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) break;  // no more data now
    if (n == 0) {
      pipe.fd = base::Descriptor();
      pipe.splitter.finish(take);
      break;
    }
    pipe.splitter.feed(std::string_view(bytes, static_cast<std::size_t>(n)), take);
    if (!all) break;  // let others take their turn
  }
}

void LocalRanks::see_deaths() {
  for (const int index : deaths_.take()) {
    siginfo_t info{};
    waitid(P_PID, static_cast<id_t>(ranks_[static_cast<std::size_t>(index)].pid), &info, WEXITED | WNOWAIT | WNOHANG);
    observer_.died(first_rank() + index, info.si_code == CLD_KILLED || info.si_code == CLD_DUMPED, info.si_status);
  }
}

void LocalRanks::send(int signal) {
  for (const Rank& rank : ranks_)
    if (rank.pid > 0) kill(-rank.pid, signal);
}

void LocalRanks::note_failed(int rank) {
  if (kept_.empty())
    for (int i = 0; i < ranks(); ++i) kept_.push_back(status_.read(i));
  status_.set_failed_rank(rank);
}

observe::StatusSnapshot LocalRanks::page_at_failure(int rank) const {
  return kept_.empty() ? page(rank) : kept_[static_cast<std::size_t>(rank - first_rank())];
}

char LocalRanks::state(int rank) const { return process_state(pid(rank)); }

bool LocalRanks::out_of_memory() const { return oom_kill_count() > oom_before_; }

void LocalRanks::reap_orphans() {
  // Orphaned descendants are reparented to this process; the ranks themselves remain zombies for now.
  for (const pid_t pid : children_of_self()) {
    const bool ours = (guardian_ && pid == guardian_->pid()) || std::count(spared_.begin(), spared_.end(), pid) > 0 ||
                      std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& r) { return r.pid == pid; });
    // A stranger that has ended is forgotten: a descendant of a rank may get its number.
    if (!ours && waitpid(pid, nullptr, WNOHANG) == pid) std::erase(strangers_, pid);
  }
}

// Whether a child that is no rank descends from one. Orphans of strangers become our children too, so if there were
// strangers, only the run's marks and the ranks' process groups tell; else it can be nothing else.
bool LocalRanks::is_ours(pid_t child) const {
  if (child == guardian_->pid() || std::count(spared_.begin(), spared_.end(), child) > 0) return false;
  if (!had_strangers_) return true;
  if (std::count(strangers_.begin(), strangers_.end(), child) > 0) return false;
  const pid_t group = getpgid(child);
  return has_environment(child, host_.marks()) ||
         std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& r) { return r.pid == group; });
}

void LocalRanks::begin_end() {
  if (!ended_) send(SIGKILL);
}

void LocalRanks::finish_end(double seconds) {
  if (std::exchange(ended_, true)) return;
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (const Rank& rank : ranks_) {  // do not wait forever for a rank that hangs in the kernel
    while (rank.pid > 0 && waitpid(rank.pid, nullptr, WNOHANG) == 0) {
      if (Clock::now() >= end) {
        observer_.notice(LogLevel::Error,
                         base::join("process ", rank.pid, " does not end after SIGKILL: it hangs inside the kernel"));
        break;
      }
      poll(nullptr, 0, 2);
    }
  }
  // Descendants that left their process group are now our children.
  while (guardian_ && Clock::now() < end) {
    bool left = false;
    for (const pid_t pid : children_of_self()) {
      if (!is_ours(pid)) continue;
      left = true;
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, WNOHANG);
    }
    for (const pid_t pid : processes_with_environment(host_.marks())) {
      left = true;
      kill(pid, SIGKILL);
    }
    if (!left) break;
    poll(nullptr, 0, 5);
  }
  for (int i = 0; i < ranks(); ++i) {
    for (const Stream stream : {Stream::Out, Stream::Err}) {
      read_pipe(i, stream, true);
      ranks_[static_cast<std::size_t>(i)].pipes[static_cast<int>(stream)].splitter.finish(
          [&](std::string_view line) { observer_.line(first_rank() + i, stream, line); });
    }
  }
  guardian_.reset();
}

}  // namespace zero::launch
