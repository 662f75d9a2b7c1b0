// See node_topology.h.
#include "net/node_topology.h"

namespace zero::net {

NodeTopology::NodeTopology(const std::vector<std::pair<int, int>>& local) {
  for (std::size_t rank = 0; rank < local.size();) {
    const auto ranks = static_cast<std::size_t>(local[rank].second);
    bool fits = ranks > 0 && rank + ranks <= local.size();
    for (std::size_t i = 0; fits && i < ranks; ++i)
      fits = local[rank + i] == std::pair(static_cast<int>(i), static_cast<int>(ranks));
    if (!fits) {
      first_.clear();
      host_of_.clear();
      return;
    }
    host_of_.insert(host_of_.end(), ranks, count());
    first_.push_back(static_cast<int>(rank));
    rank += ranks;
  }
}

int NodeTopology::ranks(int host) const {
  const int end = host + 1 < count() ? first(host + 1) : static_cast<int>(host_of_.size());
  return end - first(host);
}

bool NodeTopology::divisible_by(int count) const {
  for (int host = 0; host < this->count(); ++host)
    if (count < 1 || ranks(host) % count != 0) return false;
  return !empty();
}

bool NodeTopology::even() const {
  for (int host = 1; host < count(); ++host)
    if (ranks(host) != ranks(0)) return false;
  return true;
}

}  // namespace zero::net
