// The gradient factor (see clipping.h).
#include "optim/clipping.h"

#include <algorithm>
#include <cmath>

namespace zero::optim {

float gradient_factor(double scale, double norm, double max_norm, double postmultiply) {
  // Like torch's clip_grad_norm_, but never enlarges gradients.
  const bool clips = max_norm > 0 && std::isfinite(norm) && norm >= 0;
  const double excess = clips ? std::max(1.0, (norm + 1e-6) / max_norm) : 1.0;
  return static_cast<float>(postmultiply / (scale * excess));
}

}  // namespace zero::optim
