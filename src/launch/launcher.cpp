// Checks before the start, the environment all ranks share, and restarts; an attempt itself is in
// attempt.cpp.
#include "launch/launcher.h"

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
#include "launch/attempt.h"
#include "launch/host.h"
#include "launch/rank_process.h"

extern char** environ;

namespace zero::launch {
namespace {

constexpr std::uint64_t kLeastLogSpace = 1 << 20;
constexpr double kLongestBackOff = 60;

// Names that the launcher sets itself or that belong to whoever started it.
bool replaced(std::string_view name) {
  static constexpr std::string_view kOwn[] = {
      "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
      "MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "ZERO_RUN_ID", "ZERO_TOKEN", "ZERO_STATUS_FD",
      "ZERO_RESTART_COUNT", "ZERO_LOG_DIR"};
  return name.substr(0, 13) == "TORCHELASTIC_" || std::find(std::begin(kOwn), std::end(kOwn), name) != std::end(kOwn);
}

bool worth_a_restart(const AttemptResult& result) {
  switch (result.exit_code) {
    case 0: case 2: case 3: case 4: case 7: case 75: case 130: case 143: return false;
    case 5: return !result.disk_full;
    default: return true;
  }
}

}  // namespace

Launcher::Launcher(LaunchSettings settings, LaunchSink& sink) : settings_(std::move(settings)), sink_(sink) {
  ZERO_CHECK(!settings_.program.empty() && settings_.ranks > 0, "launcher without a program or ranks");
  program_path_ = find_program(settings_.program[0]);
  run_id_ = new_run_id();
  const char* token = std::getenv("ZERO_TOKEN");
  token_ = token && *token ? token : random_hex(32);
  if (settings_.master_port > 0) check_port(settings_.master_port);
  if (!settings_.log_folder.empty()) {
    std::error_code error;
    settings_.log_folder = std::filesystem::absolute(settings_.log_folder);
    std::filesystem::create_directories(settings_.log_folder, error);
    struct statvfs space {};
    if (error || access(settings_.log_folder.c_str(), W_OK) != 0 || statvfs(settings_.log_folder.c_str(), &space) != 0)
      throw IoError(base::join("[--log-dir] got ", error ? error.message() : std::strerror(errno), " for ", settings_.log_folder.string(),
                               ", expected a folder that can be written"));
    const std::uint64_t free_bytes = static_cast<std::uint64_t>(space.f_bavail) * space.f_frsize;
    if (free_bytes < kLeastLogSpace)
      throw IoError(base::join("[--log-dir] got ", free_bytes, " bytes free in ", settings_.log_folder.string(), ", expected at least ",
                               kLeastLogSpace));
  }
  const char* omp = std::getenv("OMP_NUM_THREADS");
  const bool given = (omp && *omp) || settings_.environment.count("OMP_NUM_THREADS");
  if (!given) {
    const int per_rank = settings_.cores.empty() ? usable_cores() / settings_.ranks : static_cast<int>(settings_.cores[0].size());
    omp_threads_ = std::max(1, per_rank);
  }
}

LaunchResult Launcher::run() {
  const auto began = std::chrono::steady_clock::now();
  // A signal that was ignored when we were started (nohup, a shell's "&") stays so; not SIGINT and
  // SIGTERM, which only ever come on purpose.
  sigset_t signals;
  sigemptyset(&signals);
  for (const int s : {SIGINT, SIGTERM, SIGUSR1}) sigaddset(&signals, s);
  struct sigaction hangup {};
  if (sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN) sigaddset(&signals, SIGHUP);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  const Descriptor signal_fd(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (signal_fd.get() < 0) throw IoError(base::join("[Launcher] got ", std::strerror(errno), ", expected a signalfd"));
  prctl(PR_SET_CHILD_SUBREAPER, 1);

  std::vector<std::string> common;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text(*entry);
    const std::string name(text.substr(0, text.find('=')));
    if (replaced(name) || settings_.environment.count(name)) continue;
    if (name == "CUDA_VISIBLE_DEVICES" && !settings_.visible_devices.empty()) continue;
    if (name == "OMP_NUM_THREADS" && omp_threads_ > 0) continue;
    common.emplace_back(text);
  }
  for (const auto& [name, value] : settings_.environment) common.push_back(name + "=" + value);
  if (omp_threads_ > 0) common.push_back("OMP_NUM_THREADS=" + std::to_string(omp_threads_));
  if (!settings_.visible_devices.empty()) {
    std::string list;
    for (const std::string& device : settings_.visible_devices) list += (list.empty() ? "" : ",") + device;
    common.push_back("CUDA_VISIBLE_DEVICES=" + list);
  }
  common.push_back("ZERO_TOKEN=" + token_);

  LaunchResult result;
  std::int64_t failed_step = -1;
  for (int attempt = 0;; ++attempt) {
    const std::string id = attempt == 0 ? run_id_ : run_id_ + ".r" + std::to_string(attempt);
    AttemptResult outcome;
    {
      Attempt job(settings_, sink_, signal_fd.get(), id, program_path_, common, attempt);
      outcome = job.run();
    }
    result.run_id = id;
    result.attempts = attempt + 1;
    result.exit_code = outcome.exit_code;
    if (outcome.failure) sink_.failed(*outcome.failure);
    if (outcome.exit_code == 0 || outcome.asked_to_stop || !worth_a_restart(outcome) || attempt == settings_.max_restarts) break;
    const std::int64_t step = outcome.failure ? outcome.failure->step : -1;
    if (attempt > 0 && step >= 0 && step == failed_step && outcome.commits == 0) {
      sink_.notice(LogLevel::Error, base::join("not restarted again: two failures in a row at step ", step, " without a new checkpoint"));
      break;
    }
    failed_step = step;
    const double pause = std::min(kLongestBackOff, static_cast<double>(1 << std::min(attempt, 6)));
    sink_.notice(LogLevel::Warning, base::join("restart ", attempt + 1, " of ", settings_.max_restarts, " in ", pause, " s"));
    sink_.pump();
    pollfd waiting{signal_fd.get(), POLLIN, 0};
    if (poll(&waiting, 1, static_cast<int>(pause * 1000)) > 0) {
      signalfd_siginfo info{};
      [[maybe_unused]] const ssize_t n = ::read(signal_fd.get(), &info, sizeof info);
      result.exit_code = info.ssi_signo == SIGINT ? 130 : 143;
      break;
    }
  }
  // Hand over what is left to print; a signal now means that nobody waits for it.
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
