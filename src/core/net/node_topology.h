// Which ranks share a host, for ranks numbered host by host, as launchers do. No communication.
#pragma once
#include <utility>
#include <vector>

namespace zero::net {

class NodeTopology {
 public:
  NodeTopology() = default;
  // (local_rank, local_size) of every rank, in order. Empty if ranks are not numbered host by host.
  explicit NodeTopology(const std::vector<std::pair<int, int>>& local);

  bool empty() const { return first_.empty(); }
  int count() const { return static_cast<int>(first_.size()); }
  int host_of(int rank) const { return host_of_[static_cast<std::size_t>(rank)]; }
  // The host's ranks are first(host) to first(host) + ranks(host) - 1.
  int first(int host) const { return first_[static_cast<std::size_t>(host)]; }
  int ranks(int host) const;
  // Whether the topology is known and `count` divides the number of ranks of every host.
  bool divisible_by(int count) const;
  // Whether all hosts have the same number of ranks.
  bool even() const;

 private:
  std::vector<int> first_, host_of_;
};

}  // namespace zero::net
