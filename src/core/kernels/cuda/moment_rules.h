// Update rules that keep a mean of gradients, for one element: as in kernels/update_simd.cpp, with the same rounding of
// every operation.
#pragma once
#include "kernels/cuda/arithmetic.h"
#include "kernels/update_simd.h"

namespace zero::cuda {

using kernels::UpdateConstants;

// a if it is larger, else b.
ZERO_HOST_DEVICE float larger(float a, float b) { return a > b ? a : b; }
// m + weight (g - m), as torch's lerp.
ZERO_HOST_DEVICE float lerp(float m, float g, float weight) {
  const bool long_way = weight >= 0.5f;
  return fused_multiply_add(long_way ? subtract(weight, 1.0f) : weight, subtract(g, m), long_way ? g : m);
}

template <bool kL2, bool kAmsgrad>
struct Adam {
  static constexpr int kSlots = kAmsgrad ? 3 : 2;
  float decay, weight1, beta2, new2, root2, eps, negative_step;
  bool has_weight_decay, long_way;
  explicit Adam(const UpdateConstants& c)
      : decay(kL2 ? c.weight_decay : c.keep),
        weight1(c.new1 < 0.5f ? c.new1 : c.new1 - 1),
        beta2(c.beta2),
        new2(c.new2),
        root2(c.root2),
        eps(c.eps),
        negative_step(c.negative_step),
        has_weight_decay(c.has_weight_decay),
        long_way(c.new1 >= 0.5f) {}
  ZERO_HOST_DEVICE void operator()(float& p, float& m, float& v, float& largest, float g) const {
    if constexpr (kL2) {
      if (has_weight_decay) g = fused_multiply_add(p, decay, g);
    } else {
      p = multiply(p, decay);
    }
    m = fused_multiply_add(weight1, subtract(g, m), long_way ? g : m);
    v = fused_multiply_add(multiply(new2, g), g, multiply(v, beta2));
    if constexpr (kAmsgrad) largest = larger(largest, v);
    const float denominator = add(divide(square_root(kAmsgrad ? largest : v), root2), eps);
    p = add(p, divide(multiply(negative_step, m), denominator));
  }
};

struct Moments {
  float decay, keep, new1, beta2, new2;
  bool has_weight_decay, decoupled;
  explicit Moments(const UpdateConstants& c)
      : decay(c.weight_decay),
        keep(c.keep),
        new1(c.new1),
        beta2(c.beta2),
        new2(c.new2),
        has_weight_decay(c.has_weight_decay),
        decoupled(c.decoupled) {}
  ZERO_HOST_DEVICE void update(float& p, float& m, float& v, float& g) const {
    if (has_weight_decay && decoupled) p = multiply(p, keep);
    if (has_weight_decay && !decoupled) g = fused_multiply_add(p, decay, g);
    m = lerp(m, g, new1);
    v = fused_multiply_add(multiply(new2, g), g, multiply(v, beta2));
  }
};

struct NAdam {
  static constexpr int kSlots = 2;
  Moments moments;
  float correction2, eps, negative_step, moment_step;
  explicit NAdam(const UpdateConstants& c)
      : moments(c),
        correction2(c.correction2),
        eps(c.eps),
        negative_step(c.negative_step),
        moment_step(c.moment_step) {}
  ZERO_HOST_DEVICE void operator()(float& p, float& m, float& v, float&, float g) const {
    moments.update(p, m, v, g);
    const float denominator = add(square_root(divide(v, correction2)), eps);
    p = add(p, divide(multiply(negative_step, g), denominator));
    p = add(p, divide(multiply(moment_step, m), denominator));
  }
};

struct RAdam {
  static constexpr int kSlots = 2;
  Moments moments;
  float eps, negative_step;
  bool adaptive;
  explicit RAdam(const UpdateConstants& c)
      : moments(c), eps(c.eps), negative_step(c.negative_step), adaptive(c.adaptive) {}
  ZERO_HOST_DEVICE void operator()(float& p, float& m, float& v, float&, float g) const {
    moments.update(p, m, v, g);
    const float step = multiply(negative_step, m);
    p = add(p, adaptive ? divide(step, add(square_root(v), eps)) : step);
  }
};

struct Adamax {
  static constexpr int kSlots = 2;
  float weight_decay, new1, beta2, eps, negative_step;
  bool has_weight_decay;
  explicit Adamax(const UpdateConstants& c)
      : weight_decay(c.weight_decay),
        new1(c.new1),
        beta2(c.beta2),
        eps(c.eps),
        negative_step(c.negative_step),
        has_weight_decay(c.has_weight_decay) {}
  ZERO_HOST_DEVICE void operator()(float& p, float& m, float& norm, float&, float g) const {
    if (has_weight_decay) g = fused_multiply_add(p, weight_decay, g);
    m = lerp(m, g, new1);
    norm = larger(multiply(norm, beta2), add(g < 0 ? -g : g, eps));
    p = add(p, divide(multiply(negative_step, m), norm));
  }
};

struct Lion {
  static constexpr int kSlots = 1;
  float keep, beta1, new1, beta2, new2, negative_step;
  explicit Lion(const UpdateConstants& c)
      : keep(c.keep), beta1(c.beta1), new1(c.new1), beta2(c.beta2), new2(c.new2), negative_step(c.negative_step) {}
  ZERO_HOST_DEVICE void operator()(float& p, float& m, float&, float&, float g) const {
    const float u = fused_multiply_add(new1, g, multiply(m, beta1));
    const float move = u > 0.0f ? negative_step : u < 0.0f ? -negative_step : u;
    p = add(multiply(p, keep), move);
    m = fused_multiply_add(new2, g, multiply(m, beta2));
  }
};

}  // namespace zero::cuda
