// The factor that multiplies every gradient element before the update. It removes the loss scale, clips by global norm,
// and completes a mean whose division was deferred.
#pragma once

namespace zero::optim {

// float(postmultiply / (scale * max(1, (norm + 1e-6) / max_norm))), computed in fp64.
//   scale         the loss scale of this backward, > 0
//   norm          global L2 norm of the unscaled gradients; negative or non-finite: unknown, no clipping
//   max_norm      gradient_clipping; 0: no clipping
//   postmultiply  remaining factor from the sum over ranks to a mean, else 1; already included in `norm`
// Exactly 1 if no factor applies, and a power of two if the only factor is a power-of-two loss scale.
float gradient_factor(double scale, double norm, double max_norm, double postmultiply = 1);

}  // namespace zero::optim
