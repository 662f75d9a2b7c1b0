// The work of one host in a run, and the checks before its first process. The same for the launcher's host and for
// other hosts, which receive it over the protocol. Starts nothing.
#pragma once
#include <map>
#include <string>
#include <vector>

namespace zero::launch {

struct HostPlan {
  std::string name;  // as in the hostfile
  std::string run_id;
  int attempt = 0;                           // 0: the first
  int previous_world = 0;                    // ranks of the attempt before
  int first_rank = 0, ranks = 1, world = 1;  // this host's are [first_rank, first_rank + ranks)
  int group = 0, groups = 1;                 // number of this host, and of all
  std::vector<std::string> program;          // [0] is looked up in PATH unless it has a slash
  std::string user;                          // for ssh to this host; empty: ssh's own choice
  std::string folder;                        // working directory; empty: the launcher's own
  std::vector<int> slots;  // indices in the host's list of GPUs; empty: CUDA_VISIBLE_DEVICES is not changed
  bool bind_cores = false;
  std::string core_list;  // "0,2-5", empty: all
  std::string master_address = "127.0.0.1";
  int master_port = 0;
  std::string log_folder;                          // of this run; empty: none
  std::map<std::string, std::string> environment;  // added to every rank's
  std::string token;                               // ZERO_TOKEN of the ranks; empty: not set
  bool pass_local_rank = false;
  // Descriptors of this process, one per rank (base/kept_memory.h); empty: none. Not for other hosts, whose agents end
  // with every attempt.
  std::vector<int> kept;
};

// A plan that was checked on this host.
class PreparedHost {
 public:
  // Finds the program, the cores, the GPUs. Throws ConfigError or IoError.
  explicit PreparedHost(HostPlan plan);

  const HostPlan& plan() const { return plan_; }
  const std::string& path() const { return path_; }
  int omp_threads() const { return omp_threads_; }  // 0: OMP_NUM_THREADS is already set
  std::vector<std::string> arguments_of(int local_rank) const;
  // status_fd: the rank's descriptor of the status pages.
  std::vector<std::string> environment_of(int local_rank, int status_fd) const;
  int kept_fd(int local_rank) const;                // -1: none
  std::vector<int> cores_of(int local_rank) const;  // empty: not bound
  // Environment entries that identify the ranks of this host and run.
  std::vector<std::string> marks() const;

 private:
  HostPlan plan_;
  std::string path_;
  std::vector<std::string> common_;
  std::vector<std::vector<int>> cores_;
  int omp_threads_ = 0;
};

// Whether the launcher sets the variable itself, or it belongs to the environment of the launcher's caller.
bool set_by_launcher(const std::string& name);
// Variables of this process for ranks on other hosts: NCCL_*, GLOO_*, CUDA_* (except the choice of devices), OMP_*,
// UCX_*, ZERO_*, and those named. Throws ConfigError if a named variable is not set.
std::map<std::string, std::string> environment_for_others(const std::vector<std::string>& named);

}  // namespace zero::launch
