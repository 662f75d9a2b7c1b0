// Who a rank is, as its launcher tells it through environment variables: torchrun and `zero run`,
// Open MPI, MPICH and Intel MPI, a Slurm step, or nobody. No torch and no transport here; nothing
// is connected, and nothing is read but the variables (and who the parent process is).
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace zero::net {

// Who a rank is, and where it heard it. `source` is "torchrun environment", "Open MPI", ...
struct ProcessInfo {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // among the ranks of this host
  std::string source = "no launcher";
  std::string master_addr;  // empty: not known
  int master_port = 0;      // 0: not known
  std::string run_id;       // the same on every rank of one run, differs between runs at one time
  bool one_host() const { return local_size == size; }

  // Of a group among some ranks of a run: run_ranks[r] is the run's number of the group's rank r. Empty: it is the run.
  std::vector<int> run_ranks;
  int run_size = 0;
  int rank_in_run(int rank_here) const;
  // This rank as number `place` of `members`, ranks here in their new order. `name` tells the group from others of the
  // run. local_rank and local_size are those of a group on one host.
  ProcessInfo of_members(const std::vector<int>& members, int place, const std::string& name) const;
  // "rank 5/8", as the run numbers it; "rank 5", in a group "rank 1 of the group (rank 5 of the run)".
  std::string place() const;
  std::string name_of(int rank_here) const;
};

// A variable's value, if it is set. An empty value counts as not set.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;
Environment process_environment();

// The first complete set of variables wins, in the order above; without any, a world of one. Throws
// ConfigError that names everything wrong at once: half a set where no set is complete, values that
// are not numbers or out of range, an unfinished earlier set that contradicts the chosen one.
// `parent` names the process that started this one; it tells runs of one host apart that have
// nothing else to tell them apart.
ProcessInfo identity_from_env(const Environment& environment, const std::function<std::string()>& parent);
ProcessInfo identity_from_env();

// First host of a Slurm node list: "a01" of "a[01-03,7],b"; empty if it is malformed.
std::string first_slurm_host(const std::string& node_list);
// Tasks of node number `node` in Slurm's "4(x2),3"; nothing if it is malformed or too short.
std::optional<int> slurm_tasks_of_node(const std::string& tasks, int node);

}  // namespace zero::net
