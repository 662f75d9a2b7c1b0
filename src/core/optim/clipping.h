// The one number that every gradient element is multiplied by before its update: it undoes the loss
// scale, applies the clip by global norm, and ends a mean whose division was left for later.
#pragma once

namespace zero::optim {

// float(postmultiply / (scale * max(1, (norm + 1e-6) / max_norm))), computed in fp64.
//   scale         the loss scale U of this backward, > 0
//   norm          global L2 norm of the unscaled gradients; negative or non-finite: not known, no clip
//   max_norm      gradient_clipping; 0: no clip
//   postmultiply  what the sum over ranks still lacks to be a mean (1 if nothing). `norm` already has it.
// Exactly 1 when nothing is to be done, and a power of two when only a power-of-two scale is undone.
float gradient_factor(double scale, double norm, double max_norm, double postmultiply = 1);

}  // namespace zero::optim
