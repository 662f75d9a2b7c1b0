// The identity of a rank, from its launcher's environment variables: torchrun and `zero run`, Open MPI, MPICH and Intel
// MPI, a Slurm step, or none. No torch, no connections; reads only the variables and the parent process.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace zero::net {

// `source` names the launcher: "torchrun environment", "Open MPI", ...
struct ProcessInfo {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // among the ranks of this host
  static constexpr const char* kNoLauncher = "no launcher";
  std::string source = kNoLauncher;
  bool launched() const { return source != kNoLauncher; }
  std::string master_addr;  // empty: unknown
  int master_port = 0;      // 0: unknown
  std::string run_id;       // the same on every rank of a run; differs between concurrent runs
  std::string attempt;      // number of torchrun's restart, if it counts them
  std::string secret;       // net::secret_of(); empty: none
  bool one_host() const { return local_size == size; }

  // For a group of some ranks of a run: run_ranks[r] is the run's number of the group's rank r. Empty: the whole run.
  std::vector<int> run_ranks;
  int run_size = 0;
  std::string group;  // its name, if it has one
  int rank_in_run(int rank_here) const;
  // A hash that is equal on the members of a group and unique in the run; 0: all ranks of the run.
  std::uint64_t group_id() const;
  // This rank as number `place` of `members`, which are ranks here in their new order. `name` distinguishes the group
  // from others of the run. local_rank and local_size are those of a group on one host.
  ProcessInfo of_members(const std::vector<int>& members, int place, const std::string& name) const;
  // place(): "rank 5/8", in the run. name_of(): "rank 5"; in a group, "rank 1 of the group (rank 5 of the run)", or
  // "rank 1 of tp (rank 5 of the run)" with its name.
  std::string place() const;
  std::string name_of(int rank_here) const;
};

// A variable's value, if set. An empty value counts as not set.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;
Environment process_environment();

// The first complete set of variables is used, in the order above; without any, the world size is 1. Throws ConfigError
// that names all faults at once: no complete set, values that are not numbers or out of range, an incomplete earlier
// set that contradicts the chosen one. `parent` names the parent process; it distinguishes runs of one host that
// nothing else distinguishes.
ProcessInfo identity_from_env(const Environment& environment, const std::function<std::string()>& parent);
ProcessInfo identity_from_env();

// The first host of a Slurm node list: "a01" of "a[01-03,7],b"; empty if malformed.
std::string first_slurm_host(const std::string& node_list);
// The tasks of node number `node` in Slurm's "4(x2),3"; nullopt if malformed or too short.
std::optional<int> slurm_tasks_of_node(const std::string& tasks, int node);

}  // namespace zero::net
