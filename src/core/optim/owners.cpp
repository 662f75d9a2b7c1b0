// See owners.h.
#include "optim/owners.h"

#include <algorithm>
#include <numeric>

namespace zero::optim {

std::vector<int> deal_owners(const std::vector<double>& costs, int ranks) {
  std::vector<std::size_t> order(costs.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return costs[a] > costs[b]; });
  std::vector<double> sums(static_cast<std::size_t>(ranks), 0.0);
  std::vector<int> owners(costs.size(), 0);
  for (const auto i : order) {
    const auto least = std::min_element(sums.begin(), sums.end());
    owners[i] = static_cast<int>(least - sums.begin());
    *least += costs[i];
  }
  return owners;
}

double muon_cost(const std::vector<std::int64_t>& shape) {
  double elements = 1;
  for (const auto size : shape) elements *= static_cast<double>(size);
  const auto rows = static_cast<double>(shape.front());
  return rows == 0 ? 0 : elements * std::min(rows, elements / rows);
}

}  // namespace zero::optim
