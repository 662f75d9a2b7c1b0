// Which rank updates a parameter that cannot be divided.
#pragma once
#include <cstdint>
#include <vector>

namespace zero::optim {

// A rank for each cost, by unit. Units are updated one after another, and a rank waits for the others in each: within a
// unit the largest cost goes first, to the share that has the least so far; then the largest share to the rank that has
// the least of all units so far, of equal ones to the first. No rank has more than the mean and the largest cost. The
// same on all ranks.
std::vector<std::vector<int>> deal_owners(const std::vector<std::vector<double>>& units, int ranks);

// Of Muon's products, by which its matrices are dealt: rows times columns times the smaller of both, where dimensions
// after the first are columns.
double muon_cost(const std::vector<std::int64_t>& shape);

}  // namespace zero::optim
