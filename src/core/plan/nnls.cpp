// See nnls.h. There are few unknowns, so every subset of non-zero unknowns is tried.
#include "plan/nnls.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace zero::planning {
namespace {

// Gaussian elimination with row exchange; empty if there is no unique solution.
std::vector<double> solve(std::vector<std::vector<double>> a, std::vector<double> b) {
  const std::size_t n = b.size();
  for (std::size_t k = 0; k < n; ++k) {
    std::size_t pivot = k;
    for (std::size_t r = k + 1; r < n; ++r)
      if (std::abs(a[r][k]) > std::abs(a[pivot][k])) pivot = r;
    if (std::abs(a[pivot][k]) < 1e-12) return {};
    std::swap(a[k], a[pivot]);
    std::swap(b[k], b[pivot]);
    for (std::size_t r = k + 1; r < n; ++r) {
      const double factor = a[r][k] / a[k][k];
      for (std::size_t c = k; c < n; ++c) a[r][c] -= factor * a[k][c];
      b[r] -= factor * b[k];
    }
  }
  for (std::size_t k = n; k-- > 0;) {
    for (std::size_t c = k + 1; c < n; ++c) b[k] -= a[k][c] * b[c];
    b[k] /= a[k][k];
  }
  return b;
}

}  // namespace

double predicted(const std::vector<double>& fit, const std::vector<double>& amounts) {
  double sum = 0;
  for (std::size_t i = 0; i < fit.size(); ++i) sum += fit[i] * amounts[i];
  return sum;
}

std::vector<double> nonnegative_fit(const std::vector<FitRow>& rows) {
  const std::size_t n = rows.empty() ? 0 : rows.front().amounts.size();
  std::vector<double> scale(n, 0), best(n, 0);
  for (const auto& row : rows)
    for (std::size_t i = 0; i < n; ++i) scale[i] = std::max(scale[i], std::abs(row.amounts[i] * row.weight));
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t chosen = 0; chosen < std::size_t{1} << n; ++chosen) {
    std::vector<std::size_t> columns;
    for (std::size_t i = 0; i < n; ++i)
      if (chosen >> i & 1 && scale[i] > 0) columns.push_back(i);
    std::vector<std::vector<double>> a(columns.size(), std::vector<double>(columns.size()));
    std::vector<double> b(columns.size());
    for (const auto& row : rows) {
      for (std::size_t r = 0; r < columns.size(); ++r) {
        const double mine = row.amounts[columns[r]] * row.weight / scale[columns[r]];
        for (std::size_t c = 0; c < columns.size(); ++c)
          a[r][c] += mine * row.amounts[columns[c]] * row.weight / scale[columns[c]];
        b[r] += mine * row.seconds * row.weight;
      }
    }
    const auto solution = solve(std::move(a), std::move(b));
    if (solution.size() != columns.size() ||
        std::any_of(solution.begin(), solution.end(), [](double x) { return x < 0; }))
      continue;
    std::vector<double> fit(n, 0);
    for (std::size_t c = 0; c < columns.size(); ++c) fit[columns[c]] = solution[c] / scale[columns[c]];
    double error = 0;
    for (const auto& row : rows) error += std::pow((predicted(fit, row.amounts) - row.seconds) * row.weight, 2);
    if (error < least) least = error, best = fit;
  }
  return best;
}

}  // namespace zero::planning
