// See owners.h.
#include "optim/owners.h"

#include <algorithm>
#include <numeric>

namespace zero::optim {

namespace {

// The positions of `values`, of equal ones in order.
std::vector<std::size_t> sorted_by(const std::vector<double>& values, bool largest_first) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return largest_first ? values[a] > values[b] : values[a] < values[b];
  });
  return order;
}

}  // namespace

std::vector<std::vector<int>> deal_owners(const std::vector<std::vector<double>>& units, int ranks) {
  std::vector<double> sums(static_cast<std::size_t>(ranks), 0.0);  // of all units so far
  std::vector<std::vector<int>> owners;
  for (const auto& costs : units) {
    std::vector<double> shares(sums.size(), 0.0);
    std::vector<std::size_t> share_of(costs.size());
    for (const auto i : sorted_by(costs, true)) {
      share_of[i] = static_cast<std::size_t>(std::min_element(shares.begin(), shares.end()) - shares.begin());
      shares[share_of[i]] += costs[i];
    }
    const auto largest = sorted_by(shares, true), least = sorted_by(sums, false);
    std::vector<std::size_t> rank_of(shares.size());
    for (std::size_t k = 0; k < shares.size(); ++k) {
      rank_of[largest[k]] = least[k];
      sums[least[k]] += shares[largest[k]];
    }
    auto& mine = owners.emplace_back();
    for (const auto share : share_of) mine.push_back(static_cast<int>(rank_of[share]));
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
