// Checks before the start, the plan of each host, and restarts. run_attempt.cpp implements an attempt.
#include "tools/launch/supervise/launcher.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/check.h"
#include "base/kept_memory.h"
#include "tools/launch/local/rank_process.h"
#include "tools/launch/machine/host.h"
#include "tools/launch/remote/hostfile.h"
#include "tools/launch/supervise/run_attempt.h"

namespace zero::launch {
namespace {

constexpr std::uint64_t kLeastLogSpace = 1 << 20;
constexpr double kLongestBackOff = 60;

// Why another start would end in the same way; empty: it may not.
std::string why_final(const AttemptResult& result) {
  switch (result.exit_code) {
    case 2:
      return "a wrong command line or configuration";
    case 3:
      return "a checkpoint that is missing or damaged";
    case 4:
      return "too little memory";
    case 5:
      return result.disk_full ? "a full disk" : "";
    case 7:
      return "numbers that are not finite or differ between ranks";
    case 75:
      return "that all ranks have saved and stopped";
    case 130:
    case 143:
      return "that the run was asked to end";
    default:
      return "";
  }
}

}  // namespace

Launcher::Launcher(LaunchSettings settings, LaunchSink& sink)
    : settings_(std::move(settings)), sink_(sink), hosts_(settings_.hosts, settings_.min_ranks, settings_.min_hosts) {
  ZERO_CHECK(!settings_.program.empty() && !settings_.hosts.empty(), "launcher without a program or hosts");
  agree_on_names();
  if (settings_.hosts.size() == 1 && settings_.master_port > 0) check_port(settings_.master_port);
  if (!settings_.log_folder.empty()) {
    std::error_code error;
    settings_.log_folder = std::filesystem::absolute(settings_.log_folder);
    std::filesystem::create_directories(settings_.log_folder, error);
    struct statvfs space {};
    if (error || access(settings_.log_folder.c_str(), W_OK) != 0 || statvfs(settings_.log_folder.c_str(), &space) != 0)
      throw IoError(base::join("[--log-dir] cannot write to ", settings_.log_folder.string(), ": ",
                               error ? error.message() : std::strerror(errno)));
    const std::uint64_t free_bytes = static_cast<std::uint64_t>(space.f_bavail) * space.f_frsize;
    if (free_bytes < kLeastLogSpace)
      throw IoError(base::join("[--log-dir] got ", free_bytes, " bytes free in ", settings_.log_folder.string(),
                               ", expected at least ", kLeastLogSpace));
  }
  bool others = false;
  for (const LaunchHost& host : settings_.hosts) others |= !host.here && settings_.by_hand < 0;
  if (others) {
    others_environment_ = environment_for_others(settings_.exported);
    find_program(settings_.shell.launcher);
  }
  for (HostPlan& plan : plans(run_id_, 0, 0)) {
    if (!plan.folder.empty()) continue;
    plan.log_folder.clear();  // created when the run begins
    omp_threads_ = PreparedHost(plan).omp_threads();
  }
}

void Launcher::agree_on_names() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  token_ = variable("ZERO_TOKEN");
  if (settings_.by_hand < 0 || settings_.hosts.size() == 1) {
    run_id_ = new_run_id();
    makes_token_ = token_.empty();
    return;
  }
  // Launchers that do not communicate must derive the same name and secret.
  static constexpr std::string_view kPlain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
  run_id_ = variable("ZERO_RUN_ID");
  if (run_id_.empty()) {
    run_id_ = base::join("hosts-", settings_.master_address, "-", settings_.master_port);
    for (char& c : run_id_)
      if (kPlain.find(c) == std::string_view::npos) c = '_';
  }
  if (run_id_.size() > 100 || run_id_[0] == '.' || run_id_.find_first_not_of(kPlain) != std::string::npos)
    throw ConfigError(
        base::join("[zero run] got ZERO_RUN_ID=\"", run_id_.substr(0, 100),
                   "\", expected at most 100 letters, digits, dots, dashes and underscores, and no dot first"));
  if (token_.empty() && variable("ZERO_TOKEN_FILE").empty())
    throw ConfigError(
        "[zero run] got no ZERO_TOKEN for several hosts by hand, expected a secret that only their ranks have: "
        "anyone who reaches their ports could join them. Hint: set ZERO_TOKEN to the same random text on every "
        "host, for example of `openssl rand -hex 32`, or ZERO_TOKEN_FILE to a file with it. ZERO_TOKEN=none does "
        "without, on a network of the run's own.");
}

// The ranks meet on the first host; if that one is left out, on the next.
std::string Launcher::master_address() const {
  const LaunchHost& first = hosts_.now().front();
  if (first.name == settings_.hosts[0].name) return settings_.master_address;
  return hosts_.now().size() == 1 && first.here ? "127.0.0.1" : first.name;
}

std::vector<HostPlan> Launcher::plans(const std::string& run_id, int attempt, int previous_world) const {
  std::vector<HostPlan> list;
  const auto token = makes_token_ ? random_hex(32) : token_;  // another one for every attempt
  const std::vector<LaunchHost>& hosts = hosts_.now();
  int first_rank = 0;
  for (std::size_t h = 0; h < hosts.size(); ++h) {
    const LaunchHost& host = hosts[h];
    HostPlan plan;
    plan.name = host.name;
    plan.user = host.user;
    plan.run_id = run_id;
    plan.attempt = attempt;
    plan.previous_world = previous_world;
    plan.first_rank = first_rank;
    plan.ranks = static_cast<int>(host.slots.size());
    first_rank += plan.ranks;
    plan.world = ranks();
    plan.group = static_cast<int>(h);
    plan.groups = static_cast<int>(hosts.size());
    plan.program = settings_.program;
    plan.slots = host.slots;
    plan.bind_cores = settings_.bind_cores;
    plan.core_list = settings_.core_list;
    plan.master_address = master_address();
    plan.master_port = settings_.master_port;
    if (!settings_.log_folder.empty()) plan.log_folder = (settings_.log_folder / run_id).string();
    plan.token = token;
    plan.pass_local_rank = settings_.pass_local_rank;
    plan.environment = settings_.environment;
    if (kept_.size() == host.slots.size())
      for (const auto& memory : kept_) plan.kept.push_back(memory.get());
    if (settings_.by_hand >= 0) {
      if (settings_.by_hand == static_cast<int>(h)) list.push_back(std::move(plan));
      continue;
    }
    if (!host.here) {
      plan.folder = std::filesystem::current_path().string();
      plan.environment.insert(others_environment_.begin(), others_environment_.end());
    }
    list.push_back(std::move(plan));
  }
  return list;
}

// An agent on another host ends with its attempt, and what its ranks kept would, too. All ranks must have kept
// something, so a job with agents keeps nothing.
void Launcher::make_kept_memory() {
  const auto& hosts = hosts_.now();
  const bool agents = settings_.by_hand < 0 && (hosts.size() > 1 || !hosts[0].here);
  const auto own = static_cast<std::size_t>(std::max(settings_.by_hand, 0));
  const auto ranks = settings_.max_restarts == 0 || agents || own >= hosts.size() ? 0 : hosts[own].slots.size();
  if (kept_.size() == ranks) return;
  kept_.clear();  // another number of ranks cannot use what is in it
  while (kept_.size() < ranks) {
    base::Descriptor memory(base::make_kept_memory());
    if (memory.get() < 0) {
      sink_.notice(LogLevel::Info, base::join("ranks cannot keep snapshots in memory: ", std::strerror(errno)));
      return kept_.clear();
    }
    kept_.push_back(std::move(memory));
  }
}

bool Launcher::prepare_restart(const AttemptResult& failed, int signals, LaunchResult& result) {
  if (failed.rule) rule_ = failed.rule;
  Restart next;
  next.was = hosts_.ranks();
  next.left_out = hosts_.leave_out(failed.fault);
  std::string why = next.left_out, problem = hosts_.choose(rule_);
  next.ranks = hosts_.ranks();
  const bool first_moved = hosts_.now().front().name != settings_.hosts[0].name;
  if (problem.empty() && hosts_.now().size() > 1 && first_moved && is_loopback(master_address()))
    problem = base::join("the first host that is left is ", hosts_.now().front().name,
                         ", expected a name that the others can reach");
  if (!problem.empty()) {
    sink_.notice(LogLevel::Error, base::join("no restart", why.empty() ? "" : " (" + why + ")", ": ", problem));
    result.exit_code = static_cast<int>(ExitCode::kPeer);
    return false;
  }
  if (next.ranks < hosts_.left() && next.ranks != next.was)
    why += base::join(why.empty() ? "" : "; ", "the configuration does not allow ", hosts_.left());
  const std::int64_t step = failed.failure ? failed.failure->step : -1;
  if (why.empty() && !result.restarts.empty() && step >= 0 && step == failed_step_ && failed.commits == 0) {
    sink_.notice(LogLevel::Error,
                 base::join("not restarted again: two failures in a row at step ", step, " without a new checkpoint"));
    return false;
  }
  failed_step_ = why.empty() ? step : -1;
  if (failed.commits > 0 || !why.empty()) fruitless_ = 0;
  const double pause = std::min(kLongestBackOff, static_cast<double>(1 << std::min(fruitless_++, 6)));
  result.restarts.push_back(next);
  const std::string change =
      base::join(" on ", next.ranks, next.ranks == 1 ? " rank" : " ranks", " (was ", next.was, ": ", why, ")");
  sink_.notice(LogLevel::Warning, base::join("restart ", result.restarts.size(), " of ", settings_.max_restarts,
                                             why.empty() ? "" : change, " in ", pause, " s"));
  if (next.ranks != next.was && rule_ && rule_->batch_parts == 0)
    sink_.notice(LogLevel::Warning,
                 "train_batch_size is not set: steps on another number of ranks have another number of samples");
  sink_.pump();
  return waits(pause, signals, result);
}

// False if a signal ended the wait.
bool Launcher::waits(double seconds, int signals, LaunchResult& result) {
  pollfd waiting{signals, POLLIN, 0};
  if (poll(&waiting, 1, static_cast<int>(seconds * 1000)) <= 0) return true;
  signalfd_siginfo info{};
  [[maybe_unused]] const ssize_t n = ::read(signals, &info, sizeof info);
  result.exit_code = info.ssi_signo == SIGINT ? 130 : 143;
  return false;
}

LaunchResult Launcher::run() {
  const auto began = std::chrono::steady_clock::now();
  // A signal that was ignored at start-up (nohup, a shell's "&") stays ignored, except SIGINT and SIGTERM, which are
  // always sent deliberately.
  sigset_t signals;
  sigemptyset(&signals);
  for (const int s : {SIGINT, SIGTERM, SIGUSR1}) sigaddset(&signals, s);
  struct sigaction hangup {};
  if (sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN) sigaddset(&signals, SIGHUP);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  const base::Descriptor signal_fd(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (signal_fd.get() < 0) throw IoError(base::join("[Launcher] cannot make a signalfd: ", std::strerror(errno)));
  prctl(PR_SET_CHILD_SUBREAPER, 1);

  LaunchResult result;
  for (int attempt = 0;; ++attempt) {
    const std::string id = attempt == 0 ? run_id_ : run_id_ + ".r" + std::to_string(attempt);
    AttemptResult outcome;
    sink_.placed(hosts_.now());
    make_kept_memory();
    {
      RunAttempt job(settings_, sink_, signal_fd.get(), plans(id, attempt, result.ranks));
      outcome = job.run();
    }
    result.run_id = id;
    result.attempts = attempt + 1;
    result.ranks = hosts_.ranks();
    result.exit_code = outcome.exit_code;
    if (outcome.failure) sink_.failed(*outcome.failure);
    // Left with too few ranks, the program may have found out by itself what the configuration does not allow.
    const bool misfit = attempt > 0 && hosts_.elastic() && outcome.exit_code == static_cast<int>(ExitCode::kConfig) &&
                        outcome.rule && !outcome.rule->allows(result.ranks);
    if (outcome.exit_code == 0 || outcome.asked_to_stop || attempt == settings_.max_restarts) break;
    if (const std::string why = why_final(outcome); !why.empty() && !misfit) {
      sink_.notice(
          LogLevel::Warning,
          base::join("not restarted: exit code ", outcome.exit_code, " means ", why,
                     outcome.uses_libzero ? ""
                                          : ". Hint: that is the code's meaning for programs of libzero, which "
                                            "this one is not; if it means something else, exit with 1."));
      break;
    }
    if (!prepare_restart(outcome, signal_fd.get(), result)) break;
  }
  // Write the remaining output. After a signal, do not wait for it.
  const bool hurried = result.exit_code == 130 || result.exit_code == 143;
  const auto flush_end = std::chrono::steady_clock::now() + std::chrono::milliseconds(hurried ? 300 : 24 * 3600 * 1000);
  while (!sink_.pump() && std::chrono::steady_clock::now() < flush_end) {
    pollfd waiting{signal_fd.get(), POLLIN, 0};
    if (poll(&waiting, 1, 5) > 0) break;
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return result;
}

}  // namespace zero::launch
