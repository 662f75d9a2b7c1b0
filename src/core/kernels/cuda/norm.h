// The gradient norm's arithmetic on one thread, in fp64 with the bits of the host's (optim/clipping.h, and the step
// program's norm). Shared with the host, for tests.
#pragma once
#include "kernels/cuda/arithmetic.h"
#include "kernels/cuda/interface.h"

namespace zero::cuda {

ZERO_HOST_DEVICE bool finite(double value) {
  constexpr double kLargest = 1.7976931348623157e308;
  return value >= -kLargest && value <= kLargest;  // false for NaN
}

// Adds sums in order, group by group: place -1 ends a group.
struct OrderedSum {
  double total = 0, group = 0;
  ZERO_HOST_DEVICE void next(int place, double sum) {
    if (place >= 0) {
      group = add(group, sum);
    } else {
      total = add(total, group);
      group = 0;
    }
  }
};

// Pairs of a sum and a tag, one of each rank.
ZERO_HOST_DEVICE StepNorm step_norm_of(const double* parts, int num_parts, const NormSettings& settings) {
  double total = 0;
  bool same = true;
  for (int rank = 0; rank < num_parts; ++rank) {
    total = add(total, parts[2 * rank]);
    same = same && bits_of(parts[2 * rank + 1]) == bits_of(parts[1]);
  }
  const double norm = divide(multiply(square_root(total), settings.postmultiply), settings.scale);
  double excess = 1;
  if (settings.clip > 0 && finite(norm) && norm >= 0) {
    const double ratio = divide(add(norm, 1e-6), settings.clip);
    if (ratio > 1) excess = ratio;
  }
  const double factor = divide(settings.postmultiply, multiply(settings.scale, excess));
  return {total, static_cast<float>(factor), !same || (settings.checks_overflow != 0 && !finite(total)) ? 1 : 0};
}

}  // namespace zero::cuda
