// Reads the launchers' variables. The sets are one table; other information (rank 0's address, a run's identity) is
// derived afterwards.
#include "net/process_info.h"

#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <sstream>
#include <vector>

#include <zero/errors.h>

#include "base/check.h"

namespace zero::net {
namespace {

using base::join;

constexpr int kDefaultPort = 29500;

enum class Launcher { Torchrun, OpenMpi, Mpich, Slurm };

// Variable names of one launcher. `local_size` lists alternatives.
struct VariableSet {
  Launcher launcher;
  const char* source;
  const char *rank, *size, *local_rank;
  std::vector<const char*> local_size;
};

const std::array<VariableSet, 4>& variable_sets() {
  static const std::array<VariableSet, 4> sets{{
      {Launcher::Torchrun,
       "torchrun environment",
       "RANK",
       "WORLD_SIZE",
       "LOCAL_RANK",
       {"LOCAL_WORLD_SIZE", "LOCAL_SIZE"}},
      {Launcher::OpenMpi,
       "Open MPI",
       "OMPI_COMM_WORLD_RANK",
       "OMPI_COMM_WORLD_SIZE",
       "OMPI_COMM_WORLD_LOCAL_RANK",
       {"OMPI_COMM_WORLD_LOCAL_SIZE"}},
      {Launcher::Mpich, "MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", {"MPI_LOCALNRANKS"}},
      {Launcher::Slurm, "Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", {}},
  }};
  return sets;
}

std::optional<long long> number_of(const std::string& text) {
  long long value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

class Reader {
 public:
  Reader(const Environment& environment, const std::function<std::string()>& parent)
      : environment_(environment), parent_(parent) {}

  ProcessInfo read() {
    const VariableSet* chosen = nullptr;
    std::vector<const VariableSet*> halves;
    for (const auto& set : variable_sets()) {
      if (!begun(set)) continue;
      if (missing_of(set).empty()) {
        chosen = &set;
        break;
      }
      halves.push_back(&set);
    }
    if (!chosen) {
      for (const auto* half : halves) faults_.push_back(half_text(*half));
      throw_faults();
      return {};
    }
    ProcessInfo identity = numbers_of(*chosen);
    for (const auto* half : halves) contradictions(*half, *chosen, identity);
    throw_faults();
    meeting_point(*chosen, identity);
    throw_faults();
    identity.run_id = run_id_of(*chosen, identity);
    identity.attempt = environment_("TORCHELASTIC_RESTART_COUNT").value_or("");
    return identity;
  }

 private:
  // Slurm also sets its variables in batch scripts and interactive shells, in which no task was started: they have no
  // step, or a reserved step number.
  bool begun(const VariableSet& set) const {
    constexpr long long kFirstReservedStep = 0xfffffff0;
    if (set.launcher == Launcher::Slurm) {
      const auto step = environment_("SLURM_STEP_ID");
      return step && number_of(*step).value_or(0) < kFirstReservedStep && environment_(set.rank);
    }
    return environment_(set.rank) || environment_(set.size) || environment_(set.local_rank);
  }

  std::vector<std::string> missing_of(const VariableSet& set) const {
    std::vector<std::string> missing;
    for (const char* name : {set.rank, set.size})
      if (!environment_(name)) missing.push_back(name);
    // World size 1 needs no location.
    const auto size = environment_(set.size);
    if (size && number_of(*size) == 1) return missing;
    if (!environment_(set.local_rank)) missing.push_back(set.local_rank);
    if (!set.local_size.empty() && !local_size_name(set)) missing.push_back(set.local_size.front());
    return missing;
  }

  const char* local_size_name(const VariableSet& set) const {
    for (const char* name : set.local_size)
      if (environment_(name)) return name;
    return nullptr;
  }

  std::string half_text(const VariableSet& set) const {
    std::string present, missing;
    for (const char* name : {set.rank, set.size, set.local_rank})
      if (const auto value = environment_(name)) present += join(present.empty() ? "" : ", ", name, "=", *value);
    for (const auto& name : missing_of(set)) missing += join(missing.empty() ? "" : ", ", name);
    return join("got ", present, " without ", missing, ", expected the whole set of ", set.source);
  }

  // The value if within [least, most]; otherwise adds a fault and returns `least`.
  int number(const std::string& name, long long least, long long most, const std::string& what = "") {
    const auto text = environment_(name);
    const auto value = number_of(text.value_or(""));
    if (value && *value >= least && *value <= most) return static_cast<int>(*value);
    std::string expected = join("a whole number from ", least);
    if (most < std::numeric_limits<int>::max())
      expected += join(" to ", most);
    else
      expected += " on";
    faults_.push_back(join("got ", name, "='", text.value_or(""), "', expected ", expected, what));
    return static_cast<int>(least);
  }

  ProcessInfo numbers_of(const VariableSet& set) {
    constexpr long long kNoLimit = std::numeric_limits<int>::max();
    ProcessInfo identity;
    identity.source = set.source;
    if (set.launcher == Launcher::Torchrun && environment_("ZERO_RUN_ID")) identity.source = "zero run";
    const auto faults_before = faults_.size();
    identity.size = number(set.size, 1, kNoLimit);
    const bool size_known = faults_.size() == faults_before;
    identity.rank = number(set.rank, 0, size_known ? identity.size - 1 : kNoLimit,
                           size_known ? join(" (", set.size, " is ", identity.size, ")") : "");
    bool local_size_known = true;
    if (set.launcher == Launcher::Slurm) {
      identity.local_size = size_known ? slurm_local_size(identity) : 1;
      local_size_known = size_known && identity.local_size > 0;
    } else if (const char* name = local_size_name(set)) {
      const auto before = faults_.size();
      identity.local_size = number(name, 1, size_known ? identity.size : kNoLimit);
      local_size_known = faults_.size() == before;
    }
    if (environment_(set.local_rank))
      identity.local_rank = number(set.local_rank, 0, local_size_known ? identity.local_size - 1 : kNoLimit);
    return identity;
  }

  // 0, with a fault, if the variables do not specify it.
  int slurm_local_size(const ProcessInfo& identity) {
    if (identity.size == 1) return 1;
    int node = 0, nodes = 0;
    if (const auto text = environment_("SLURM_NODEID")) node = static_cast<int>(number_of(*text).value_or(0));
    for (const char* name : {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}) {
      if (const auto text = environment_(name); text && nodes == 0)
        nodes = static_cast<int>(number_of(*text).value_or(0));
    }
    if (nodes == 1) return identity.size;
    // The first two list every node; the last is the number that the user requested.
    for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"}) {
      const auto text = environment_(name);
      if (!text) continue;
      if (const auto per_node = number_of(*text)) {
        const bool fits = *per_node >= 1 && *per_node <= identity.size &&
                          (nodes > 1 ? *per_node * nodes == identity.size : identity.size % *per_node == 0);
        if (fits) return static_cast<int>(*per_node);
        continue;
      }
      const auto tasks = slurm_tasks_of_node(*text, node);
      if (tasks && *tasks <= identity.size) return *tasks;
      faults_.push_back(
          join("got ", name, "='", *text, "' on node ", node, ", expected a form like '4(x2),3' that covers the node"));
      return 0;
    }
    faults_.push_back(join("got ", identity.size, " Slurm tasks on ", nodes,
                           " nodes without their number on this one, expected "
                           "SLURM_STEP_TASKS_PER_NODE or a fitting SLURM_NTASKS_PER_NODE"));
    return 0;
  }

  // An incomplete set is ignored unless it contradicts the chosen one.
  void contradictions(const VariableSet& half, const VariableSet& chosen, const ProcessInfo& identity) {
    const auto compare = [&](const char* name, int value, const char* chosen_name) {
      const auto text = environment_(name);
      if (text && number_of(*text) != value)
        faults_.push_back(join("got ", name, "=", *text, " with ", chosen_name, "=", value,
                               ", expected one story (unset ", name, ", or complete its set with ",
                               missing_of(half).front(), ")"));
    };
    compare(half.rank, identity.rank, chosen.rank);
    compare(half.size, identity.size, chosen.size);
  }

  void meeting_point(const VariableSet& set, ProcessInfo& identity) {
    if (identity.size == 1) return;
    identity.master_addr = environment_("MASTER_ADDR").value_or("");
    if (environment_("MASTER_PORT")) identity.master_port = number("MASTER_PORT", 1, 65535);
    if (set.launcher == Launcher::Slurm) {
      for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
        const auto list = environment_(name);
        if (!list || !identity.master_addr.empty()) continue;
        identity.master_addr = first_slurm_host(*list);
        if (identity.master_addr.empty())
          faults_.push_back(join("got ", name, "='", *list, "', expected a form like 'a[01-03,7],b'"));
      }
      // Jobs that share a host need different ports.
      const auto job = number_of(environment_("SLURM_JOB_ID").value_or("0")).value_or(0);
      const auto step = number_of(environment_("SLURM_STEP_ID").value_or("0")).value_or(0);
      if (!environment_("MASTER_PORT"))
        identity.master_port = static_cast<int>(20000 + static_cast<unsigned long long>(job * 13 + step) % 12000);
    }
    if (identity.one_host()) {
      // Half of an address would be part of no run's name, so ranks started by different parents would not meet.
      const bool named = environment_("ZERO_RUN_ID") || environment_("TORCHELASTIC_RUN_ID");
      if (set.launcher == Launcher::Torchrun && !named && identity.master_addr.empty() != (identity.master_port == 0))
        faults_.push_back(
            identity.master_port == 0
                ? join("got MASTER_ADDR=", identity.master_addr,
                       " without MASTER_PORT, expected both or none (a free port, the same on every rank)")
                : join("got MASTER_PORT=", identity.master_port,
                       " without MASTER_ADDR, expected both or none (127.0.0.1 on one host)"));
      return;
    }
    if (identity.master_addr.empty())
      faults_.push_back(join("got ", identity.size, " ranks on several hosts (", set.source,
                             ") without MASTER_ADDR, expected the host of rank 0"));
    if (set.launcher == Launcher::Torchrun && !environment_("MASTER_PORT"))
      faults_.push_back(join("got ", identity.size, " ranks on several hosts (", set.source,
                             ") without MASTER_PORT, expected a free port of that host"));
    if (identity.master_port == 0) identity.master_port = kDefaultPort;
  }

  std::string run_id_of(const VariableSet& set, const ProcessInfo& identity) const {
    const auto text = [&](const char* name) { return environment_(name).value_or(""); };
    if (environment_("ZERO_RUN_ID")) return text("ZERO_RUN_ID");
    if (identity.size == 1) return "";
    if (set.launcher == Launcher::Torchrun && environment_("TORCHELASTIC_RUN_ID"))
      return join("torchelastic-", text("TORCHELASTIC_RUN_ID"), "-", text("MASTER_PORT"), "-",
                  text("TORCHELASTIC_RESTART_COUNT"));
    if (set.launcher == Launcher::OpenMpi && environment_("PMIX_NAMESPACE")) return "pmix-" + text("PMIX_NAMESPACE");
    if (set.launcher == Launcher::Slurm && environment_("SLURM_JOB_ID"))
      return join("slurm-", text("SLURM_JOB_ID"), ".", text("SLURM_STEP_ID"));
    if (!identity.master_addr.empty() && identity.master_port != 0)
      return join(identity.master_addr, ":", identity.master_port);
    return "parent-" + parent_();
  }

  void throw_faults() const {
    if (faults_.empty()) return;
    std::string text;
    for (const auto& fault : faults_) text += (text.empty() ? "" : "; ") + fault;
    throw ConfigError(join("[Communicator::from_env] ", text,
                           ". Hint: start the program with `zero run`, torchrun, mpirun or srun, or unset these "
                           "variables to run one rank"));
  }

  const Environment& environment_;
  const std::function<std::string()>& parent_;
  std::vector<std::string> faults_;
};

// The pid and the start time in clock ticks since boot, because pids are reused.
std::string parent_of_this_process() {
  const auto parent = ::getppid();
  std::ifstream in(join("/proc/", parent, "/stat"));
  std::string line;
  std::getline(in, line);
  // The name in parentheses may contain anything; the start time is field 22, the 20th after it.
  const auto close = line.rfind(')');
  std::istringstream fields(close == std::string::npos ? "" : line.substr(close + 1));
  std::string start;
  for (int i = 0; i < 20; ++i) fields >> start;
  return join(parent, "-", start);
}

}  // namespace

Environment process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (!value || *value == '\0') return std::nullopt;
    return value;
  };
}

ProcessInfo identity_from_env(const Environment& environment, const std::function<std::string()>& parent) {
  return Reader(environment, parent).read();
}

ProcessInfo identity_from_env() { return identity_from_env(process_environment(), parent_of_this_process); }

int ProcessInfo::rank_in_run(int rank_here) const {
  return rank_here < 0 || run_ranks.empty() ? rank_here : run_ranks[static_cast<std::size_t>(rank_here)];
}

ProcessInfo ProcessInfo::of_members(const std::vector<int>& members, int place, const std::string& name) const {
  ProcessInfo group = *this;
  group.rank = group.local_rank = place;
  group.size = group.local_size = static_cast<int>(members.size());
  group.run_ranks.clear();
  for (const int member : members) group.run_ranks.push_back(rank_in_run(member));
  group.run_size = run_size > 0 ? run_size : size;
  group.group.clear();
  group.run_id = join(run_id, "|", master_addr, ":", master_port, "|", name);
  return group;
}

std::uint64_t ProcessInfo::group_id() const { return run_ranks.empty() ? 0 : std::hash<std::string>{}(run_id) | 1; }

std::string ProcessInfo::place() const { return join("rank ", rank_in_run(rank), "/", run_size > 0 ? run_size : size); }

std::string ProcessInfo::name_of(int rank_here) const {
  if (run_ranks.empty() || rank_here < 0) return join("rank ", rank_here);
  return join("rank ", rank_here, " of ", group.empty() ? "the group" : group, " (rank ", rank_in_run(rank_here),
              " of the run)");
}

std::string first_slurm_host(const std::string& node_list) {
  const auto end = node_list.find_first_of("[,");
  const std::string prefix = node_list.substr(0, end);
  if (end == std::string::npos || node_list[end] == ',') return prefix;
  const auto close = node_list.find(']', end);
  if (close == std::string::npos) return "";
  const std::string ranges = node_list.substr(end + 1, close - end - 1);
  const std::string first = ranges.substr(0, ranges.find_first_of("-,"));
  if (first.empty() || first.find_first_not_of("0123456789") != std::string::npos) return "";
  // Text after the brackets belongs to the name: "rack[1-2]n[3-4]", "a[1-2]-ib".
  const std::string rest = node_list.substr(close + 1);
  if (rest.empty() || rest[0] == ',') return prefix + first;
  const auto suffix = first_slurm_host(rest);
  return suffix.empty() ? "" : prefix + first + suffix;
}

std::optional<int> slurm_tasks_of_node(const std::string& tasks, int node) {
  if (node < 0) return std::nullopt;
  std::istringstream in(tasks);
  long long covered = 0;
  std::optional<int> found;
  for (std::string entry; std::getline(in, entry, ',');) {
    long long times = 1;
    std::string count = entry;
    if (const auto open = entry.find("(x"); open != std::string::npos) {
      if (entry.back() != ')') return std::nullopt;
      times = number_of(entry.substr(open + 2, entry.size() - open - 3)).value_or(0);
      count = entry.substr(0, open);
    }
    const auto value = number_of(count);
    if (!value || *value < 1 || *value > std::numeric_limits<int>::max() || times < 1) return std::nullopt;
    covered += times;
    if (!found && node < covered) found = static_cast<int>(*value);
  }
  return found;
}

}  // namespace zero::net
