// Update rules that apply the gradient itself, with momentum or divided by a root of its squares, for one element: as
// in kernels/update_simd.cpp, with the same rounding of every operation.
#pragma once
#include "kernels/cuda/arithmetic.h"
#include "kernels/cuda/moment_rules.h"
#include "kernels/update_simd.h"

namespace zero::cuda {

using kernels::UpdateConstants;

template <bool kMomentum>
struct Sgd {
  static constexpr int kSlots = kMomentum ? 1 : 0;
  float weight_decay, negative_step, momentum, undamped;
  bool has_weight_decay, first, nesterov;
  explicit Sgd(const UpdateConstants& c)
      : weight_decay(c.weight_decay),
        negative_step(c.negative_step),
        momentum(c.momentum),
        undamped(c.undamped),
        has_weight_decay(c.has_weight_decay),
        first(c.first),
        nesterov(c.nesterov) {}
  ZERO_HOST_DEVICE void operator()(float& p, float& buffer, float&, float&, float g) const {
    if (has_weight_decay) g = fused_multiply_add(p, weight_decay, g);
    if constexpr (kMomentum) {
      buffer = first ? g : fused_multiply_add(g, undamped, multiply(buffer, momentum));
      g = nesterov ? fused_multiply_add(buffer, momentum, g) : buffer;
    }
    p = fused_multiply_add(g, negative_step, p);
  }
};

struct Adagrad {
  static constexpr int kSlots = 1;
  float weight_decay, negative_step, eps;
  bool has_weight_decay;
  explicit Adagrad(const UpdateConstants& c)
      : weight_decay(c.weight_decay),
        negative_step(c.negative_step),
        eps(c.eps),
        has_weight_decay(c.has_weight_decay) {}
  ZERO_HOST_DEVICE void operator()(float& p, float& sum, float&, float&, float g) const {
    if (has_weight_decay) g = fused_multiply_add(p, weight_decay, g);
    sum = fused_multiply_add(g, g, sum);
    p = add(p, divide(multiply(negative_step, g), add(square_root(sum), eps)));
  }
};

template <bool kMomentum, bool kCentered>
struct RmsProp {
  static constexpr int kSlots = 1 + kMomentum + kCentered;
  float weight_decay, negative_step, eps, momentum, alpha, rest;
  bool has_weight_decay;
  explicit RmsProp(const UpdateConstants& c)
      : weight_decay(c.weight_decay),
        negative_step(c.negative_step),
        eps(c.eps),
        momentum(c.momentum),
        alpha(c.beta2),
        rest(c.new2),
        has_weight_decay(c.has_weight_decay) {}
  ZERO_HOST_DEVICE void operator()(float& p, float& square, float& second, float& third, float g) const {
    if (has_weight_decay) g = fused_multiply_add(p, weight_decay, g);
    square = fused_multiply_add(multiply(rest, g), g, multiply(square, alpha));
    float variance = square;
    if constexpr (kCentered) {
      float& mean = kMomentum ? third : second;
      mean = lerp(mean, g, rest);
      variance = fused_multiply_add(-mean, mean, square);
    }
    const float step = divide(g, add(square_root(variance), eps));
    if constexpr (kMomentum) second = fused_multiply_add(second, momentum, step);
    p = fused_multiply_add(kMomentum ? second : step, negative_step, p);
  }
};

struct Adadelta {
  static constexpr int kSlots = 2;
  float weight_decay, rho, rest, eps, negative_step;
  bool has_weight_decay;
  explicit Adadelta(const UpdateConstants& c)
      : weight_decay(c.weight_decay),
        rho(c.beta2),
        rest(c.new2),
        eps(c.eps),
        negative_step(c.negative_step),
        has_weight_decay(c.has_weight_decay) {}
  ZERO_HOST_DEVICE void operator()(float& p, float& square, float& moved, float&, float g) const {
    if (has_weight_decay) g = fused_multiply_add(p, weight_decay, g);
    square = fused_multiply_add(multiply(rest, g), g, multiply(square, rho));
    const float step = multiply(divide(square_root(add(moved, eps)), square_root(add(square, eps))), g);
    moved = fused_multiply_add(multiply(rest, step), step, multiply(moved, rho));
    p = fused_multiply_add(step, negative_step, p);
  }
};

}  // namespace zero::cuda
