// Non-negative least squares: fits the cost of each kind of work to measured times. A time is modelled as the sum of
// amounts times non-negative costs.
#pragma once
#include <vector>

namespace zero::planning {

struct FitRow {
  std::vector<double> amounts;
  double seconds = 0;
  double weight = 1;  // of this row's error; 1 / seconds makes errors relative
};

// Seconds per unit of each amount, at least 0, that minimize the sum of squared weighted errors. Rows have at most 12
// amounts; an amount that is 0 in all rows gets 0.
std::vector<double> nonnegative_fit(const std::vector<FitRow>& rows);
double predicted(const std::vector<double>& fit, const std::vector<double>& amounts);

}  // namespace zero::planning
