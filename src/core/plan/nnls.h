// Speeds from measured times: times are sums of amounts divided by speeds, none of which is negative. What the amounts
// are is the caller's.
#pragma once
#include <vector>

namespace zero::planning {

struct FitRow {
  std::vector<double> amounts;
  double seconds = 0;
  double weight = 1;  // of this row's error: 1 / seconds makes errors relative
};

// Seconds for one of each amount, at least 0, with the least sum of squares of weighted errors. As many as amounts, at
// most 12; an amount that is 0 in all rows gets 0.
std::vector<double> nonnegative_fit(const std::vector<FitRow>& rows);
double predicted(const std::vector<double>& fit, const std::vector<double>& amounts);

}  // namespace zero::planning
