// States: Running until the first failure or signal; Settling if the first rank to end only lost its peers, to let the
// failed rank show; Stopping (SIGTERM sent, SIGKILL pending); Saving (ranks were asked to save and stop); Interrupted
// (SIGINT). The same for the ranks of every host; hosts differ only in HostRanks.
#include "tools/launch/supervise/run_attempt.h"

#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <sstream>

#include "base/check.h"
#include "base/system.h"
#include "tools/launch/local/local_ranks.h"
#include "tools/launch/local/process_tree.h"
#include "tools/launch/machine/host.h"
#include "tools/launch/remote/remote_ranks.h"

namespace zero::launch {
namespace {

constexpr double kSettleSeconds = 1.0;     // how much later than its peers the failed rank may end
constexpr double kInterruptSeconds = 1.0;  // from SIGINT to SIGKILL; ends everything within 2 s
constexpr double kCheckSeconds = 0.25;
// How long after SIGKILL another host may take to report the end of its ranks.
constexpr double kAnswerSeconds = 5.0, kHurriedAnswerSeconds = 0.5;
constexpr std::size_t kTailLines = 20, kTailBytes = 2000;
constexpr int kRequeue = 75;

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

}  // namespace

RunAttempt::RunAttempt(const LaunchSettings& settings, LaunchSink& sink, int signals, std::vector<HostPlan> plans)
    : settings_(settings),
      sink_(sink),
      signals_(signals),
      plans_(std::move(plans)),
      base_(plans_.at(0).first_rank),
      began_(base::steady_seconds()),
      epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  int ranks = 0;
  for (const HostPlan& plan : plans_) ranks += plan.ranks;
  ranks_ = std::vector<Rank>(static_cast<std::size_t>(ranks));
  base::watch(epoll_.get(), signals_, 0);
  for (HostPlan& plan : plans_)
    if (plan.master_port == 0) plan.master_port = free_port();
}

RunAttempt::~RunAttempt() {
  if (!ended_) end_everything();
}

double RunAttempt::now() const { return base::steady_seconds() - began_; }

observe::StatusSnapshot RunAttempt::page(int index) const {
  return ranks_[static_cast<std::size_t>(index)].host->page(base_ + index);
}

void RunAttempt::connect() {
  const std::vector<pid_t> strangers = children_of_self();  // before the connections to other hosts
  std::vector<pid_t> connections;
  LocalRanks* here = nullptr;
  RankObserver& observer = *this;
  for (const HostPlan& plan : plans_) {
    if (plan.folder.empty()) {
      auto ranks = std::make_unique<LocalRanks>(PreparedHost(plan), observer, strangers);
      here = ranks.get();
      hosts_.push_back(std::move(ranks));
    } else {
      auto ranks = std::make_unique<RemoteRanks>(plan, settings_.shell, settings_.host_timeout_s, observer);
      connections.push_back(ranks->connection());
      hosts_.push_back(std::move(ranks));
    }
    HostRanks& host = *hosts_.back();
    base::watch(epoll_.get(), host.fd(), hosts_.size());
    for (int rank = plan.first_rank; rank < plan.first_rank + plan.ranks; ++rank) at(rank).host = &host;
  }
  for (const pid_t child : connections)
    if (here) here->spare(child);
}

// On a restart, a host that cannot be reached is lost like one that fails later.
bool RunAttempt::reaches_hosts() {
  try {
    wait_for_events();
    for (attended_ = 0; attended_ < hosts_.size(); ++attended_) hosts_[attended_]->tick();
    return true;
  } catch (const CommError& error) {
    if (settings_.min_ranks == 0 || plans_[0].attempt == 0) throw;
    unreachable_ = error.what();
    return false;
  }
}

bool RunAttempt::wait_until_ready() {
  while (!std::all_of(hosts_.begin(), hosts_.end(), [](const auto& host) { return host->ready(); })) {
    if (!reaches_hosts()) return false;
    signalfd_siginfo info{};
    if (::read(signals_, &info, sizeof info) != static_cast<ssize_t>(sizeof info)) continue;
    stop_signal_ = static_cast<int>(info.ssi_signo);
    state_ = State::Interrupted;
    return false;
  }
  return true;
}

void RunAttempt::open_logs() {
  if (plans_[0].log_folder.empty()) return;
  logs_.emplace(plans_[0].log_folder);
  for (int i = 0; i < count(); ++i) {
    for (const Stream stream : {Stream::Out, Stream::Err}) {
      ranks_[static_cast<std::size_t>(i)].log[static_cast<int>(stream)] =
          logs_->append(base::join("rank-", base_ + i, stream == Stream::Out ? ".out" : ".err"));
    }
  }
}

AttemptResult RunAttempt::run() {
  connect();
  if (wait_until_ready()) {
    open_logs();
    alive_ = count();
    for (const auto& host : hosts_) host->start();
    for (Rank& rank : ranks_) rank.changed_at = now();
  }
  looked_at_ = now();
  while (alive_ > 0) {
    wait_for_events();
    see_signals();
    see_time();
  }
  end_everything();
  return judge();
}

void RunAttempt::wait_for_events() {
  const bool drained = sink_.pump();
  if (sink_.full() == lines_wanted_) {  // block the ranks while our output is blocked
    lines_wanted_ = !lines_wanted_;
    for (const auto& host : hosts_) host->listen(lines_wanted_);
  }
  double until = next_check_;
  if (kill_at_ >= 0) until = std::min(until, kill_at_);
  if (state_ == State::Settling) until = std::min(until, settle_until_);
  int wait_ms = std::clamp(static_cast<int>((until - now()) * 1000) + 1, 0, 250);
  if (!drained) wait_ms = std::min(wait_ms, 10);
  epoll_event events[64];
  const int n = epoll_wait(epoll_.get(), events, 64, wait_ms);
  for (int i = 0; i < n; ++i)
    if (events[i].data.u64 > 0) {
      attended_ = events[i].data.u64 - 1;
      hosts_[attended_]->step();
    }
}

void RunAttempt::line(int rank, Stream stream, std::string_view text) {
  Rank& of = at(rank);
  const auto s = static_cast<std::size_t>(stream);
  sink_.line(rank, stream, text);
  of.tail[s].emplace_back(text.substr(0, kTailBytes));
  if (of.tail[s].size() > kTailLines) of.tail[s].pop_front();
  if (of.log[s].get() < 0) return;
  std::string whole(text);
  whole += '\n';
  std::string_view rest = whole;
  while (!rest.empty()) {
    const ssize_t n = ::write(of.log[s].get(), rest.data(), rest.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      sink_.notice(LogLevel::Warning, base::join("the log of rank ", rank, " ends here: ", std::strerror(errno)));
      of.log[s] = base::Descriptor();
      return;
    }
    rest.remove_prefix(static_cast<std::size_t>(n));
  }
}

void RunAttempt::died(int rank, bool by_signal, int code) {
  Death death;
  death.rank = rank - base_;
  death.by_signal = by_signal;
  death.code = code;
  const int ended_by = by_signal ? code : code > 128 ? code - 128 : 0;
  const std::vector<int>& sent = at(rank).sent;
  death.sent = std::find(sent.begin(), sent.end(), ended_by) != sent.end();
  see_death(std::move(death));
}

void RunAttempt::lost(int rank, const std::string& why) {
  Death death;
  death.rank = rank - base_;
  death.code = -1;
  death.lost = why;
  death.sent = killed_at_ >= 0;
  see_death(std::move(death));
}

void RunAttempt::see_death(Death death) {
  ranks_[static_cast<std::size_t>(death.rank)].dead = true;
  --alive_;
  death.at = now();
  death.after_stop = state_ == State::Stopping || state_ == State::Interrupted;
  order_.push_back(death);
  if (!is_failure(death)) {
    // Ranks that waited for it are notified only now and get the full timeout again.
    for (Rank& other : ranks_) other.changed_at = now();
    // It was asked to stop, possibly by another process; the other ranks have agreed.
    if (!death.by_signal && death.code == kRequeue && state_ == State::Running) {
      state_ = State::Saving;
      kill_at_ = now() + settings_.stop_timeout_s;
    }
    return;
  }
  // Ended by our signal, or without an error text: it did not save, so the others cannot save either.
  const int said = page(death.rank).error_code;
  if (state_ == State::Saving &&
      (death.sent || (stop_signal_ != 0 && !death.by_signal && death.lost.empty() && said == 0))) {
    killed_saves_ = true;
    kill_at_ = std::min(kill_at_, now() + settings_.grace_s);
    return;
  }
  if (state_ != State::Running && state_ != State::Saving && state_ != State::Settling) return;
  note_failure();
  const auto lost = static_cast<int>(ExitCode::kPeer);
  const bool lost_peer = death.lost.empty() && ((!death.by_signal && death.code == lost) ||
                                                (said == lost && (!death.by_signal || death.code == SIGABRT)));
  if (lost_peer) {
    if (state_ != State::Settling) settle_until_ = now() + kSettleSeconds;
    state_ = State::Settling;
  } else {
    begin_stop(settings_.grace_s);
  }
}

void RunAttempt::note_failure() {
  if (std::exchange(failed_, true)) return;
  failure_time_ = time_of_day();
  const int culprit = hang_ && hang_->rank >= 0 ? hang_->rank : order_.empty() ? 0 : order_.back().rank;
  for (const auto& host : hosts_) host->note_failed(base_ + culprit);
}

void RunAttempt::send(int signal) {
  for (const auto& host : hosts_) host->send(signal);
  for (Rank& rank : ranks_) rank.sent.push_back(signal);
}

void RunAttempt::begin_stop(double kill_after_s) {
  state_ = State::Stopping;
  send(SIGTERM);
  kill_at_ = now() + kill_after_s;
}

void RunAttempt::see_signals() {
  signalfd_siginfo info{};
  while (::read(signals_, &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    const int signal = static_cast<int>(info.ssi_signo);
    const bool first = stop_signal_ == 0;
    if (first) stop_signal_ = signal;
    const bool failing = state_ == State::Stopping || state_ == State::Settling;
    if (failing || !first) {
      // A second signal: end immediately. The exit code remains that of the first one.
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
      sink_.notice(LogLevel::Info, base::join(signal_name(signal), ": the ranks have ", settings_.stop_timeout_s,
                                              " s to save and stop"));
      state_ = State::Saving;
      send(signal == SIGHUP ? SIGTERM : signal);
      kill_at_ = now() + settings_.stop_timeout_s;
    }
  }
}

void RunAttempt::see_time() {
  const double t = now();
  if (const double gap = t - looked_at_; gap > kStoppedSeconds) {
    sink_.notice(LogLevel::Warning, base::join("the launcher was stopped for ", std::lround(gap),
                                               " s (Ctrl-Z, SIGSTOP, a frozen cgroup or a suspended machine)"));
    for (Rank& rank : ranks_) rank.changed_at += gap;  // nobody looked whether they made progress
  }
  looked_at_ = t;
  if (state_ == State::Settling && t >= settle_until_) begin_stop(settings_.grace_s);
  if (kill_at_ >= 0 && t >= kill_at_) {
    kill_at_ = t + 0.5;  // again: a process of the group may have been forking
    if (killed_at_ < 0) killed_at_ = t;
    send(SIGKILL);
    if (state_ == State::Saving) killed_saves_ = true;
  }
  if (killed_at_ >= 0 && t > killed_at_ + (state_ == State::Interrupted ? kHurriedAnswerSeconds : kAnswerSeconds))
    for (std::size_t h = 0; h < hosts_.size(); ++h)
      hosts_[h]->abandon("its host " + plans_[h].name + " does not answer");
  if (sink_.out_error() != 0 && state_ == State::Running && stop_signal_ == 0) begin_stop(settings_.grace_s);
  if (t < next_check_) return;
  next_check_ = t + kCheckSeconds;
  check_progress();
  for (const auto& host : hosts_) host->tick();
}

void RunAttempt::check_progress() {
  std::vector<observe::StatusSnapshot> pages;
  std::vector<double> idle;
  std::string states;
  for (int i = 0; i < count(); ++i) {
    Rank& rank = ranks_[static_cast<std::size_t>(i)];
    pages.push_back(page(i));
    if (pages.back().changes != rank.changes) {
      rank.changes = pages.back().changes;
      rank.changed_at = now();
    }
    idle.push_back(rank.dead ? -1 : now() - rank.changed_at);
  }
  if (state_ != State::Running || *std::max_element(idle.begin(), idle.end()) < settings_.hang_timeout_s) return;
  for (int i = 0; i < count(); ++i) states += ranks_[static_cast<std::size_t>(i)].host->state(base_ + i);
  hang_ = find_hang(pages, idle, settings_.hang_timeout_s, std::max(settings_.slow_timeout_s, settings_.hang_timeout_s),
                    states);
  if (!hang_) return;
  note_failure();
  begin_stop(settings_.grace_s);
}

void RunAttempt::write_rings() const {
  if (!logs_) return;
  for (int i = 0; i < count(); ++i) {
    const int rank = base_ + i;
    std::ostringstream out;
    for (const auto& c : ranks_[static_cast<std::size_t>(i)].host->page_at_failure(rank).collectives)
      out << '#' << c.sequence << ' ' << c.op << ' ' << c.dtype << ' ' << c.numel << ' ' << observe::state_name(c.state)
          << ' ' << c.group << ' ' << c.site << '\n';
    try {
      const base::Descriptor file = logs_->rewrite(base::join("rank-", rank, ".collectives"));
      const std::string text = out.str();
      if (::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()))
        throw IoError(
            base::join("[--log-dir] cannot write the collectives of rank ", rank, ": ", std::strerror(errno)));
    } catch (const IoError& error) {
      return sink_.notice(LogLevel::Warning, error.what());
    }
  }
}

void RunAttempt::end_everything() {
  ended_ = true;
  for (const auto& host : hosts_) host->begin_end();
  const double limit = state_ == State::Interrupted ? kHurriedAnswerSeconds : kSweepSeconds + kAnswerSeconds;
  const double end = now() + limit;
  // This host last: it also ends the remaining connections to the others.
  for (const bool here : {false, true})
    for (std::size_t h = 0; h < hosts_.size(); ++h)
      if (plans_[h].folder.empty() == here) hosts_[h]->finish_end(here ? kSweepSeconds : std::max(0.0, end - now()));
}

AttemptResult RunAttempt::judge() {
  AttemptResult result;
  for (int i = 0; i < count(); ++i) {
    const observe::StatusSnapshot last = page(i);
    result.commits += last.commits;
    if (last.world_rule) result.rule = last.world_rule;
  }
  const auto all = [&](auto test) { return std::all_of(order_.begin(), order_.end(), test); };
  const bool all_saved = all([](const Death& d) { return !d.by_signal && d.code == kRequeue; });
  const bool all_done = all([](const Death& d) { return !d.by_signal && d.code == 0; });
  if (state_ == State::Interrupted) {
    result.asked_to_stop = true;
    result.exit_code = stop_signal_ == SIGINT ? 130 : 143;
    return result;
  }
  if (!unreachable_.empty()) {
    sink_.notice(LogLevel::Error, unreachable_);
    result.fault.lost_hosts = {static_cast<int>(attended_)};
    result.exit_code = static_cast<int>(ExitCode::kPeer);
    return result;
  }
  if (state_ == State::Saving) {
    result.asked_to_stop = true;
    const bool none_lost = all([](const Death& d) { return !is_failure(d); });
    result.exit_code = all_saved || (stop_signal_ == 0 && none_lost) ? kRequeue : all_done ? 0 : 143;
    return result;
  }
  if (!failed_) {  // ended by a closed stdout, or successful
    if (sink_.out_error() != 0 && !all_done) result.asked_to_stop = true;
    return result;
  }
  if (hang_) write_rings();
  result.failure = report();
  result.disk_full = result.failure->error.find("No space left") != std::string::npos;
  for (const std::string& line : result.failure->last_lines)
    result.disk_full |= line.find("No space left on device") != std::string::npos;
  result.exit_code = result.failure->exit_code;
  result.uses_libzero = result.failure->rank < 0 || page(result.failure->rank - base_).pid != 0;
  for (std::size_t h = 0; h < plans_.size(); ++h) {
    const int first = plans_[h].first_rank, end = first + plans_[h].ranks, failed = result.failure->rank;
    if (std::any_of(order_.begin(), order_.end(),
                    [&](const Death& d) { return !d.lost.empty() && base_ + d.rank >= first && base_ + d.rank < end; }))
      result.fault.lost_hosts.push_back(static_cast<int>(h));
    if (failed >= first && failed < end) {
      result.fault.host = static_cast<int>(h);
      result.fault.slot = failed - first;
    }
  }
  result.asked_to_stop = stop_signal_ != 0;
  return result;
}

FailureReport RunAttempt::report() {
  Evidence evidence;
  evidence.first_rank = base_;
  evidence.world = plans_[0].world;
  evidence.deaths = order_;
  evidence.hang = hang_;
  evidence.time = failure_time_;
  for (std::size_t h = 0; h < hosts_.size(); ++h) {
    const std::string name =
        hosts_.size() == 1 && plans_[0].groups == 1 ? base::host_name("localhost") : plans_[h].name;
    const bool out_of_memory = hosts_[h]->out_of_memory();
    for (int rank = plans_[h].first_rank; rank < plans_[h].first_rank + plans_[h].ranks; ++rank) {
      evidence.hosts.push_back(name);
      evidence.out_of_memory.push_back(out_of_memory);
      evidence.pids.push_back(hosts_[h]->pid(rank));
      evidence.pages.push_back(hosts_[h]->page_at_failure(rank));
      // An error text may arrive after the first observed death.
      const observe::StatusSnapshot last = hosts_[h]->page(rank);
      if (evidence.pages.back().error.empty()) {
        evidence.pages.back().error = last.error;
        evidence.pages.back().error_code = last.error_code;
      }
    }
  }
  FailureReport report = find_root_cause(evidence);
  report.run_id = plans_[0].run_id;
  report.attempt = plans_[0].attempt;
  if (report.rank < 0) return report;
  const Rank& rank = at(report.rank);
  const bool err = !rank.tail[1].empty();
  const auto& tail = rank.tail[err ? 1 : 0];
  report.last_lines.assign(tail.begin(), tail.end());
  const std::string file = "rank-" + std::to_string(report.rank) + (err || tail.empty() ? ".err" : ".out");
  if (!plans_[0].log_folder.empty()) report.log_path = plans_[0].log_folder + "/" + file;
  return report;
}

}  // namespace zero::launch
