// States: Running until the first failure or signal; Settling when the first to end only lost its
// peers, to let the culprit show; Stopping (SIGTERM sent, SIGKILL due); Saving (ranks were asked to
// save and stop); Interrupted (SIGINT). Ranks stay zombies until their groups have been killed, so
// no process id can be reused under us.
#include "launch/attempt.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>

#include "base/check.h"
#include "launch/host.h"
#include "launch/process_tree.h"
#include "launch/rank_process.h"

namespace zero::launch {
namespace {

constexpr double kSettleSeconds = 1.0;       // how long the culprit may lag behind those who lost it
constexpr double kInterruptSeconds = 1.0;    // from SIGINT to SIGKILL: all is over in 2 s
constexpr double kCheckSeconds = 0.25;
constexpr double kSweepSeconds = 2.0;
constexpr std::size_t kTailLines = 20, kTailBytes = 2000;
constexpr int kRequeue = 75;

double clock_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string time_of_day() {
  timespec t{};
  clock_gettime(CLOCK_REALTIME, &t);
  tm local{};
  localtime_r(&t.tv_sec, &local);
  char text[32], all[48];
  strftime(text, sizeof text, "%H:%M:%S", &local);
  std::snprintf(all, sizeof all, "%s.%03ld", text, t.tv_nsec / 1000000);
  return all;
}

void watch(int epoll, int fd, std::uint64_t tag) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = tag;
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0)
    throw IoError(base::join("[Launcher] got ", std::strerror(errno), " from epoll_ctl, expected a watch"));
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}
int Descriptor::release() { return std::exchange(fd_, -1); }
Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.release();
  }
  return *this;
}

Attempt::Attempt(const LaunchSettings& settings, LaunchSink& sink, int signals, std::string run_id, std::string path,
                 std::vector<std::string> common_environment, int number)
    : settings_(settings), sink_(sink), signals_(signals), run_id_(std::move(run_id)), path_(std::move(path)),
      common_environment_(std::move(common_environment)), number_(number), status_(settings.ranks),
      epoll_(epoll_create1(EPOLL_CLOEXEC)), pipe_epoll_(epoll_create1(EPOLL_CLOEXEC)),
      ranks_(static_cast<std::size_t>(settings.ranks)) {
  began_ = clock_seconds();
  watch(epoll_.get(), signals_, 0);
  watch(epoll_.get(), deaths_.fd(), 1);
  watch(epoll_.get(), pipe_epoll_.get(), 2);
  port_ = settings_.master_port ? settings_.master_port : free_port();
  oom_before_ = oom_kill_count();
}

Attempt::~Attempt() {
  if (!ended_) end_everything();
}

double Attempt::now() const { return clock_seconds() - began_; }

std::vector<std::string> Attempt::environment_of(int index) const {
  std::vector<std::string> list = common_environment_;
  const std::string rank = std::to_string(index), ranks = std::to_string(settings_.ranks);
  const auto set = [&](const char* name, const std::string& value) { list.push_back(std::string(name) + "=" + value); };
  set("RANK", rank);
  set("LOCAL_RANK", rank);
  set("WORLD_SIZE", ranks);
  set("LOCAL_WORLD_SIZE", ranks);
  set("GROUP_RANK", "0");
  set("GROUP_WORLD_SIZE", "1");
  set("LOCAL_SIZE", ranks);  // the three names of DeepSpeed
  set("CROSS_RANK", "0");
  set("CROSS_SIZE", "1");
  set("MASTER_ADDR", settings_.master_address);
  set("MASTER_PORT", std::to_string(port_));
  set("ZERO_RUN_ID", run_id_);
  set("ZERO_STATUS_FD", std::to_string(status_.fd()));
  set("ZERO_RESTART_COUNT", std::to_string(number_));
  if (!settings_.log_folder.empty()) set("ZERO_LOG_DIR", (settings_.log_folder / run_id_).string());
  return list;
}

void Attempt::start_rank(int index) {
  Rank& rank = ranks_[static_cast<std::size_t>(index)];
  SpawnSettings spawned;
  spawned.path = path_;
  spawned.arguments = settings_.program;
  if (settings_.pass_local_rank) spawned.arguments.push_back("--local_rank=" + std::to_string(index));
  spawned.environment = environment_of(index);
  if (!settings_.cores.empty()) spawned.cores = settings_.cores[static_cast<std::size_t>(index)];
  spawned.keep_fd = status_.fd();
  if (!settings_.log_folder.empty()) {
    const auto folder = settings_.log_folder / run_id_;
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    for (const Stream stream : {Stream::Out, Stream::Err}) {
      const auto file = folder / ("rank-" + std::to_string(index) + (stream == Stream::Out ? ".out" : ".err"));
      Descriptor fd(open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
      if (fd.get() < 0)
        throw IoError(base::join("[--log-dir] got ", std::strerror(errno), " for ", file.string(), ", expected a file to write"));
      rank.pipes[static_cast<int>(stream)].log = std::move(fd);
    }
  }
  const SpawnedProcess process = spawn(spawned);
  rank.pid = process.pid;
  rank.changed_at = now();
  ++alive_;
  guardian_->watch(process.pid);
  deaths_.add(index, process.pid);
  rank.pipes[0].fd = Descriptor(process.out);
  rank.pipes[1].fd = Descriptor(process.err);
  for (const int s : {0, 1}) watch(pipe_epoll_.get(), rank.pipes[s].fd.get(), static_cast<std::uint64_t>(index) * 2 + static_cast<std::uint64_t>(s));
}

AttemptResult Attempt::run() {
  guardian_ = std::make_unique<Guardian>(run_id_);
  for (int i = 0; i < settings_.ranks; ++i) start_rank(i);
  while (alive_ > 0) {
    wait_for_events();
    see_deaths();
    see_signals();
    see_time();
  }
  end_everything();
  return judge();
}

void Attempt::wait_for_events() {
  const bool drained = sink_.pump();
  if (sink_.full() == pipes_watched_) {  // let ranks wait while nobody reads our output
    if (pipes_watched_) {
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, pipe_epoll_.get(), nullptr);
    } else {
      watch(epoll_.get(), pipe_epoll_.get(), 2);
    }
    pipes_watched_ = !pipes_watched_;
  }
  double until = next_check_;
  if (kill_at_ >= 0) until = std::min(until, kill_at_);
  if (state_ == State::Settling) until = std::min(until, settle_until_);
  int wait_ms = std::clamp(static_cast<int>((until - now()) * 1000) + 1, 0, 250);
  if (!drained) wait_ms = std::min(wait_ms, 10);
  epoll_event events[8];
  const int n = epoll_wait(epoll_.get(), events, 8, wait_ms);
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u64 != 2) continue;
    epoll_event pipes[64];
    const int count = epoll_wait(pipe_epoll_.get(), pipes, 64, 0);
    for (int k = 0; k < count; ++k)
      read_pipe(static_cast<int>(pipes[k].data.u64 / 2), static_cast<Stream>(pipes[k].data.u64 % 2), false);
  }
}

void Attempt::emit(int index, Stream stream, std::string_view line) {
  Pipe& pipe = ranks_[static_cast<std::size_t>(index)].pipes[static_cast<int>(stream)];
  sink_.line(index, stream, line);
  pipe.tail.emplace_back(line.substr(0, kTailBytes));
  if (pipe.tail.size() > kTailLines) pipe.tail.pop_front();
  if (pipe.log.get() < 0) return;
  std::string text(line);
  text += '\n';
  std::string_view rest = text;
  while (!rest.empty()) {
    const ssize_t n = ::write(pipe.log.get(), rest.data(), rest.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      sink_.notice(LogLevel::Warning, base::join("the log of rank ", index, " ends here: ", std::strerror(errno)));
      pipe.log = Descriptor();
      return;
    }
    rest.remove_prefix(static_cast<std::size_t>(n));
  }
}

void Attempt::read_pipe(int index, Stream stream, bool all) {
  Pipe& pipe = ranks_[static_cast<std::size_t>(index)].pipes[static_cast<int>(stream)];
  const auto take = [&](std::string_view line) { emit(index, stream, line); };
  char bytes[64 * 1024];
  while (pipe.fd.get() >= 0) {
    const ssize_t n = ::read(pipe.fd.get(), bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) break;  // nothing more for now
    if (n == 0) {
      pipe.fd = Descriptor();
      pipe.splitter.finish(take);
      break;
    }
    pipe.splitter.feed(std::string_view(bytes, static_cast<std::size_t>(n)), take);
    if (!all) break;  // others want their turn
    sink_.pump();
  }
}

void Attempt::see_deaths() {
  for (const int index : deaths_.take()) {
    Rank& rank = ranks_[static_cast<std::size_t>(index)];
    siginfo_t info{};
    waitid(P_PID, static_cast<id_t>(rank.pid), &info, WEXITED | WNOWAIT | WNOHANG);
    rank.dead = true;
    --alive_;
    Death death;
    death.rank = index;
    death.by_signal = info.si_code == CLD_KILLED || info.si_code == CLD_DUMPED;
    death.code = info.si_status;
    death.at = now();
    death.after_stop = state_ == State::Stopping || state_ == State::Interrupted;
    const int ended_by = death.by_signal ? death.code : death.code > 128 ? death.code - 128 : 0;
    death.sent = std::find(rank.sent.begin(), rank.sent.end(), ended_by) != rank.sent.end();
    order_.push_back(death);
    if (!is_failure(death)) {
      // Whoever waited for it learns so only now: the others get the whole limit again.
      for (Rank& other : ranks_) other.changed_at = now();
      // It was told to stop, perhaps by somebody else than us: the others have agreed with it.
      if (!death.by_signal && death.code == kRequeue && state_ == State::Running) {
        state_ = State::Saving;
        kill_at_ = now() + settings_.stop_timeout_s;
      }
      continue;
    }
    // Ended by our signal, or in a way of its own that no error text explains: it did not save,
    // so the rest cannot either.
    if (state_ == State::Saving && (death.sent || (stop_signal_ != 0 && !death.by_signal && status_.read(index).error_code == 0))) {
      killed_saves_ = true;
      kill_at_ = std::min(kill_at_, now() + settings_.grace_s);
      continue;
    }
    if (state_ == State::Running || state_ == State::Saving || state_ == State::Settling) {
      note_failure();
      const int said = status_.read(index).error_code;
      const auto lost = static_cast<int>(ExitCode::kPeer);
      if ((!death.by_signal && death.code == lost) || (said == lost && (!death.by_signal || death.code == SIGABRT))) {
        if (state_ != State::Settling) settle_until_ = now() + kSettleSeconds;
        state_ = State::Settling;
      } else {
        begin_stop(settings_.grace_s);
      }
    }
  }
}

void Attempt::note_failure() {
  if (!pages_at_failure_.empty()) return;
  failure_time_ = time_of_day();
  for (int i = 0; i < settings_.ranks; ++i) pages_at_failure_.push_back(status_.read(i));
  status_.set_failed_rank(hang_ && hang_->rank >= 0 ? hang_->rank : order_.empty() ? 0 : order_.back().rank);
}

void Attempt::send(int signal) {
  for (Rank& rank : ranks_) {
    if (rank.pid <= 0) continue;
    kill(-rank.pid, signal);
    rank.sent.push_back(signal);
  }
}

void Attempt::begin_stop(double kill_after_s) {
  state_ = State::Stopping;
  send(SIGTERM);
  kill_at_ = now() + kill_after_s;
}

void Attempt::see_signals() {
  signalfd_siginfo info{};
  while (::read(signals_, &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    const int signal = static_cast<int>(info.ssi_signo);
    const bool first = stop_signal_ == 0;
    if (first) stop_signal_ = signal;
    const bool failing = state_ == State::Stopping || state_ == State::Settling;
    if (failing || !first) {
      // Enough was said: end it now. The exit code stays that of the first reason.
      if (!failing && signal == SIGINT) stop_signal_ = SIGINT;
      forced_ = true;
      if (state_ != State::Interrupted && !failing) state_ = State::Interrupted;
      kill_at_ = now();
      send(SIGKILL);
    } else if (signal == SIGINT) {
      sink_.notice(LogLevel::Info, "interrupted: the ranks are ended without a save");
      state_ = State::Interrupted;
      send(SIGINT);
      kill_at_ = now() + kInterruptSeconds;
    } else {
      sink_.notice(LogLevel::Info, base::join(signal_name(signal), ": the ranks have ", settings_.stop_timeout_s, " s to save and stop"));
      state_ = State::Saving;
      send(signal == SIGHUP ? SIGTERM : signal);
      kill_at_ = now() + settings_.stop_timeout_s;
    }
  }
}

void Attempt::see_time() {
  const double t = now();
  if (state_ == State::Settling && t >= settle_until_) begin_stop(settings_.grace_s);
  if (kill_at_ >= 0 && t >= kill_at_) {
    kill_at_ = t + 0.5;  // again: a group may have been forking
    send(SIGKILL);
    if (state_ == State::Saving) killed_saves_ = true;
  }
  if (sink_.out_error() != 0 && state_ == State::Running && stop_signal_ == 0) begin_stop(settings_.grace_s);
  if (t < next_check_) return;
  next_check_ = t + kCheckSeconds;
  check_progress();
  reap_orphans();
}

void Attempt::check_progress() {
  std::vector<base::StatusSnapshot> pages;
  std::vector<double> idle;
  std::string states;
  for (int i = 0; i < settings_.ranks; ++i) {
    Rank& rank = ranks_[static_cast<std::size_t>(i)];
    pages.push_back(status_.read(i));
    if (pages.back().changes != rank.changes) {
      rank.changes = pages.back().changes;
      rank.changed_at = now();
    }
    idle.push_back(rank.dead ? -1 : now() - rank.changed_at);
  }
  if (state_ != State::Running || *std::max_element(idle.begin(), idle.end()) < settings_.hang_timeout_s) return;
  for (const Rank& rank : ranks_) states += process_state(rank.pid);
  hang_ = find_hang(pages, idle, settings_.hang_timeout_s, std::max(settings_.slow_timeout_s, settings_.hang_timeout_s), states);
  if (!hang_) return;
  note_failure();
  write_rings();
  begin_stop(settings_.grace_s);
}

void Attempt::write_rings() const {
  if (settings_.log_folder.empty()) return;
  for (int i = 0; i < settings_.ranks; ++i) {
    std::ofstream out(settings_.log_folder / run_id_ / ("rank-" + std::to_string(i) + ".collectives"));
    for (const auto& c : pages_at_failure_[static_cast<std::size_t>(i)].collectives)
      out << '#' << c.sequence << ' ' << c.op << ' ' << c.dtype << ' ' << c.numel << ' ' << base::state_name(c.state) << ' ' << c.group
          << ' ' << c.site << '\n';
  }
}

void Attempt::reap_orphans() {
  // Grandchildren whose parent ended come to us; the ranks themselves stay zombies for now.
  for (const pid_t pid : children_of_self()) {
    const bool ours = pid == guardian_->pid() ||
                      std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& r) { return r.pid == pid; });
    if (!ours) waitpid(pid, nullptr, WNOHANG);
  }
}

void Attempt::end_everything() {
  ended_ = true;
  send(SIGKILL);
  const double end = now() + kSweepSeconds;
  for (const Rank& rank : ranks_) {  // one that hangs inside the kernel must not hold us for ever
    while (rank.pid > 0 && waitpid(rank.pid, nullptr, WNOHANG) == 0) {
      if (now() >= end) {
        sink_.notice(LogLevel::Error, base::join("process ", rank.pid, " does not end after SIGKILL: it hangs inside the kernel"));
        break;
      }
      poll(nullptr, 0, 2);
    }
  }
  // What had left its group has become our child.
  const pid_t guardian = guardian_ ? guardian_->pid() : -1;
  const std::string entry = "ZERO_RUN_ID=" + run_id_;
  while (now() < end) {
    bool left = false;
    for (const pid_t pid : children_of_self()) {
      if (pid == guardian) continue;
      left = true;
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, WNOHANG);
    }
    for (const pid_t pid : processes_with_environment(entry)) {
      left = true;
      kill(pid, SIGKILL);
    }
    if (!left) break;
    poll(nullptr, 0, 5);
  }
  for (int i = 0; i < settings_.ranks; ++i) {
    for (const Stream stream : {Stream::Out, Stream::Err}) {
      read_pipe(i, stream, true);
      Pipe& pipe = ranks_[static_cast<std::size_t>(i)].pipes[static_cast<int>(stream)];
      pipe.splitter.finish([&](std::string_view line) { emit(i, stream, line); });
    }
  }
  guardian_.reset();
}

AttemptResult Attempt::judge() {
  AttemptResult result;
  for (int i = 0; i < settings_.ranks; ++i) result.commits += status_.read(i).commits;
  const auto all = [&](auto test) { return std::all_of(order_.begin(), order_.end(), test); };
  const bool all_saved = all([](const Death& d) { return !d.by_signal && d.code == kRequeue; });
  const bool all_done = all([](const Death& d) { return !d.by_signal && d.code == 0; });
  if (state_ == State::Interrupted) {
    result.asked_to_stop = true;
    result.exit_code = stop_signal_ == SIGINT ? 130 : 143;
    return result;
  }
  if (state_ == State::Saving) {
    result.asked_to_stop = true;
    const bool none_lost = all([](const Death& d) { return !is_failure(d); });
    result.exit_code = all_saved || (stop_signal_ == 0 && none_lost) ? kRequeue : all_done ? 0 : 143;
    return result;
  }
  if (pages_at_failure_.empty()) {  // no failure; a closed stdout ended it, or all went well
    if (sink_.out_error() != 0 && !all_done) result.asked_to_stop = true;
    return result;
  }
  Evidence evidence;
  evidence.host = host_name();
  evidence.deaths = order_;
  evidence.pages = pages_at_failure_;
  evidence.hang = hang_;
  evidence.time = failure_time_;
  evidence.out_of_memory = oom_kill_count() > oom_before_;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    evidence.pids.push_back(ranks_[i].pid);
    // An error text may come after the death that was seen first.
    const base::StatusSnapshot last = status_.read(static_cast<int>(i));
    if (evidence.pages[i].error.empty()) {
      evidence.pages[i].error = last.error;
      evidence.pages[i].error_code = last.error_code;
    }
  }
  FailureReport report = find_root_cause(evidence);
  report.run_id = run_id_;
  report.attempt = number_;
  if (report.rank >= 0) {
    const Rank& rank = ranks_[static_cast<std::size_t>(report.rank)];
    const bool err = !rank.pipes[1].tail.empty();
    const auto& tail = rank.pipes[err ? 1 : 0].tail;
    report.last_lines.assign(tail.begin(), tail.end());
    const std::string file = "rank-" + std::to_string(report.rank) + (err || tail.empty() ? ".err" : ".out");
    if (!settings_.log_folder.empty()) report.log_path = (settings_.log_folder / run_id_ / file).string();
  }
  result.disk_full = report.error.find("No space left") != std::string::npos;
  for (const std::string& line : report.last_lines) result.disk_full |= line.find("No space left on device") != std::string::npos;
  result.exit_code = report.exit_code;
  result.asked_to_stop = stop_signal_ != 0;
  result.failure = std::move(report);
  return result;
}

}  // namespace zero::launch
