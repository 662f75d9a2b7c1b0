// Which rank updates a parameter that cannot be divided.
#pragma once
#include <cstdint>
#include <vector>

namespace zero::optim {

// A rank for each cost: the largest first, to the rank that has the least so far; of equal ones the first. No rank has
// more than the mean and the largest cost. The same on all ranks.
std::vector<int> deal_owners(const std::vector<double>& costs, int ranks);

// Of Muon's products, by which its matrices are dealt: rows times columns times the smaller of both, where dimensions
// after the first are columns.
double muon_cost(const std::vector<std::int64_t>& shape);

}  // namespace zero::optim
