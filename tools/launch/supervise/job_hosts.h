// The hosts and slots that a job still has after failures, and the number of ranks that it continues with. Pure:
// nothing is started or ended.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/world_rule.h"

namespace zero::launch {

struct LaunchHost {
  std::string name;        // as in the hostfile; shown, and passed to ssh
  std::vector<int> slots;  // one rank each; GPU slots if the host has GPUs
  bool here = true;        // whether it is this host
  std::string user = {};   // for ssh; empty: ssh's own choice
};

// What a failed attempt says about its machines. Positions are those in JobHosts::now() of that attempt.
struct HostFault {
  std::vector<int> lost_hosts;
  int host = -1, slot = -1;  // of the rank that failed first; -1: unknown, or the network
};

class JobHosts {
 public:
  // min_ranks: 0 = nothing is left out, every attempt has all ranks.
  JobHosts(std::vector<LaunchHost> hosts, int min_ranks, int min_hosts);

  // Of the present attempt, in the order of their ranks.
  const std::vector<LaunchHost>& now() const { return now_; }
  int ranks() const { return count(now_); }
  bool elastic() const { return min_ranks_ > 0; }

  // Leaves out lost hosts, and a slot that also failed first in the attempt before. Returns what it left out, such as
  // "host w2 lost" or "slot 2 died twice"; empty: nothing.
  std::string leave_out(const HostFault& fault);
  // Chooses now(): the largest number of ranks, of those left and at least min_ranks, that `rule` allows; without a
  // rule, all that are left. Returns an empty text, or why there is no such number, and now() stays.
  std::string choose(const std::optional<base::WorldRule>& rule);
  int left() const { return count(left_); }

 private:
  static int count(const std::vector<LaunchHost>& hosts);
  std::string name_of(const std::string& host, int slot) const;

  std::vector<LaunchHost> all_, left_, now_;
  int min_ranks_, min_hosts_;
  std::optional<std::pair<std::string, int>> failed_;  // host and slot of the last failure
};

}  // namespace zero::launch
