// Builds the environment of a rank, for every way of starting it.
#include "tools/launch/supervise/host_plan.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/check.h"
#include "tools/launch/local/rank_process.h"
#include "tools/launch/machine/host.h"
#include "tools/launch/supervise/log_folder.h"

extern char** environ;

namespace zero::launch {
namespace {

bool starts_with_one_of(std::string_view name, std::initializer_list<std::string_view> prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](std::string_view p) { return name.substr(0, p.size()) == p; });
}

std::string name_of(std::string_view entry) { return std::string(entry.substr(0, entry.find('='))); }

}  // namespace

bool set_by_launcher(const std::string& name) {
  static constexpr std::string_view kOwn[] = {
      "RANK",         "WORLD_SIZE",      "LOCAL_RANK",  "LOCAL_WORLD_SIZE", "GROUP_RANK",         "GROUP_WORLD_SIZE",
      "ROLE_RANK",    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",      "LOCAL_SIZE",         "CROSS_RANK",
      "CROSS_SIZE",   "ZERO_RUN_ID",     "ZERO_TOKEN",  "ZERO_STATUS_FD",   "ZERO_RESTART_COUNT", "ZERO_PREVIOUS_WORLD",
      "ZERO_LOG_DIR", "ZERO_KEEP_FD"};
  return starts_with_one_of(name, {"TORCHELASTIC_"}) ||
         std::find(std::begin(kOwn), std::end(kOwn), name) != std::end(kOwn);
}

std::map<std::string, std::string> environment_for_others(const std::vector<std::string>& named) {
  std::map<std::string, std::string> values;
  for (char** entry = environ; *entry; ++entry) {
    const std::string name = name_of(*entry);
    if (!starts_with_one_of(name, {"NCCL_", "GLOO_", "CUDA_", "OMP_", "UCX_", "ZERO_"})) continue;
    // Each host selects its own devices.
    if (set_by_launcher(name) || name == "CUDA_VISIBLE_DEVICES") continue;
    values[name] = *entry + name.size() + 1;
  }
  for (const std::string& name : named) {
    const char* value = std::getenv(name.c_str());
    if (!value || name.empty() || name.find('=') != std::string::npos)
      throw ConfigError(base::join("[--export] got \"", name.substr(0, 80),
                                   "\", which is not set, expected the name of a variable. "
                                   "Hint: --env-file FILE takes lines of NAME=VALUE."));
    if (set_by_launcher(name))
      throw ConfigError(
          base::join("[--export] got ", name, ", expected a variable that `zero run` does not set itself"));
    values[name] = value;
  }
  return values;
}

PreparedHost::PreparedHost(HostPlan plan) : plan_(std::move(plan)) {
  ZERO_CHECK(!plan_.program.empty() && plan_.ranks > 0, "a host without a program or ranks");
  if (!plan_.folder.empty() && chdir(plan_.folder.c_str()) != 0)
    throw ConfigError(base::join("[zero run] cannot enter the working directory ", plan_.folder, ": ",
                                 std::strerror(errno), ". Hint: every host needs the same folder."));
  path_ = find_program(plan_.program[0]);
  if (plan_.bind_cores || !plan_.core_list.empty()) {
    const std::vector<int> allowed = allowed_cores();
    std::vector<int> cores = allowed;
    if (!plan_.core_list.empty()) cores = parse_core_list(plan_.core_list, "--bind-core-list");
    for (const int core : cores)
      if (std::find(allowed.begin(), allowed.end(), core) == allowed.end())
        throw ConfigError(base::join("[--bind-core-list] got core ", core, ", expected one of the ", allowed.size(),
                                     " that this process may use (", allowed.front(), " to ", allowed.back(), ")"));
    cores_ = deal_cores(cores, plan_.ranks);
  }
  const std::vector<std::string> gpus = gpu_slots();
  std::string devices;
  if (!gpus.empty()) {
    for (const int slot : plan_.slots) {
      if (slot < 0 || slot >= static_cast<int>(gpus.size()))
        throw ConfigError(base::join("[zero run] got slot ", slot, " of ", plan_.name, ", expected one of its ",
                                     gpus.size(), " GPUs"));
      devices += (devices.empty() ? "" : ",") + gpus[static_cast<std::size_t>(slot)];
    }
  }
  // With several hosts, the rendezvous is on the first.
  if (plan_.groups > 1 && plan_.group == 0) check_port(plan_.master_port);
  if (!plan_.log_folder.empty()) LogFolder{plan_.log_folder};  // the program may write to it
  const char* omp = std::getenv("OMP_NUM_THREADS");
  if (!(omp && *omp) && !plan_.environment.count("OMP_NUM_THREADS"))
    omp_threads_ = std::max(1, cores_.empty() ? usable_cores() / plan_.ranks : static_cast<int>(cores_[0].size()));

  for (char** entry = environ; *entry; ++entry) {
    const std::string name = name_of(*entry);
    if (set_by_launcher(name) || plan_.environment.count(name)) continue;
    if (name == "CUDA_VISIBLE_DEVICES" && !devices.empty()) continue;
    if (name == "OMP_NUM_THREADS" && omp_threads_ > 0) continue;
    common_.emplace_back(*entry);
  }
  for (const auto& [name, value] : plan_.environment) common_.push_back(name + "=" + value);
  const auto set = [&](const char* name, const auto& value) { common_.push_back(base::join(name, "=", value)); };
  if (omp_threads_ > 0) set("OMP_NUM_THREADS", omp_threads_);
  if (!devices.empty()) set("CUDA_VISIBLE_DEVICES", devices);
  if (!plan_.token.empty()) set("ZERO_TOKEN", plan_.token);
  set("WORLD_SIZE", plan_.world);
  set("LOCAL_WORLD_SIZE", plan_.ranks);
  set("GROUP_RANK", plan_.group);
  set("GROUP_WORLD_SIZE", plan_.groups);
  set("LOCAL_SIZE", plan_.ranks);  // the three names of DeepSpeed
  set("CROSS_RANK", plan_.group);
  set("CROSS_SIZE", plan_.groups);
  set("MASTER_ADDR", plan_.master_address);
  set("MASTER_PORT", plan_.master_port);
  set("ZERO_RUN_ID", plan_.run_id);
  set("ZERO_RESTART_COUNT", plan_.attempt);
  if (plan_.attempt > 0) set("ZERO_PREVIOUS_WORLD", plan_.previous_world);
  if (!plan_.log_folder.empty()) set("ZERO_LOG_DIR", plan_.log_folder);
}

std::vector<std::string> PreparedHost::arguments_of(int local_rank) const {
  std::vector<std::string> words = plan_.program;
  if (plan_.pass_local_rank) words.push_back("--local_rank=" + std::to_string(local_rank));
  return words;
}

std::vector<std::string> PreparedHost::environment_of(int local_rank, int status_fd) const {
  std::vector<std::string> list = common_;
  list.push_back("RANK=" + std::to_string(plan_.first_rank + local_rank));
  list.push_back("LOCAL_RANK=" + std::to_string(local_rank));
  list.push_back("ZERO_STATUS_FD=" + std::to_string(status_fd));
  if (const int kept = kept_fd(local_rank); kept >= 0) list.push_back("ZERO_KEEP_FD=" + std::to_string(kept));
  return list;
}

int PreparedHost::kept_fd(int local_rank) const {
  return plan_.kept.empty() ? -1 : plan_.kept.at(static_cast<std::size_t>(local_rank));
}

std::vector<int> PreparedHost::cores_of(int local_rank) const {
  return cores_.empty() ? std::vector<int>{} : cores_[static_cast<std::size_t>(local_rank)];
}

std::vector<std::string> PreparedHost::marks() const {
  return {"ZERO_RUN_ID=" + plan_.run_id, "GROUP_RANK=" + std::to_string(plan_.group)};
}

}  // namespace zero::launch
