// The update rules of kernels/update_simd.cpp for one GPU thread, with the same rounding of every operation. Reads
// gradient, master and optimizer states of one element or four; writes master, states and the low-precision parameter.
// The host can call them too, for tests.
#pragma once
#include "kernels/cuda/arithmetic.h"
#include "kernels/update_simd.h"

namespace zero::cuda {

using kernels::UpdateConstants;
using kernels::UpdateRange;

template <bool kL2>
struct Adam {
  static constexpr int kSlots = 2;
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
  ZERO_HOST_DEVICE void operator()(float& p, float& m, float& v, float g) const {
    if constexpr (kL2) {
      if (has_weight_decay) g = fused_multiply_add(p, decay, g);
    } else {
      p = multiply(p, decay);
    }
    m = fused_multiply_add(weight1, subtract(g, m), long_way ? g : m);
    v = fused_multiply_add(multiply(new2, g), g, multiply(v, beta2));
    const float denominator = add(divide(square_root(v), root2), eps);
    p = add(p, divide(multiply(negative_step, m), denominator));
  }
};

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
  ZERO_HOST_DEVICE void operator()(float& p, float& buffer, float&, float g) const {
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
  ZERO_HOST_DEVICE void operator()(float& p, float& sum, float&, float g) const {
    if (has_weight_decay) g = fused_multiply_add(p, weight_decay, g);
    sum = fused_multiply_add(g, g, sum);
    p = add(p, divide(multiply(negative_step, g), add(square_root(sum), eps)));
  }
};

struct Lion {
  static constexpr int kSlots = 1;
  float keep, beta1, new1, beta2, new2, negative_step;
  explicit Lion(const UpdateConstants& c)
      : keep(c.keep), beta1(c.beta1), new1(c.new1), beta2(c.beta2), new2(c.new2), negative_step(c.negative_step) {}
  ZERO_HOST_DEVICE void operator()(float& p, float& m, float&, float g) const {
    const float u = fused_multiply_add(new1, g, multiply(m, beta1));
    const float move = u > 0.0f ? negative_step : u < 0.0f ? -negative_step : u;
    p = add(multiply(p, keep), move);
    m = fused_multiply_add(new2, g, multiply(m, beta2));
  }
};

template <class Algorithm>
struct Update {
  Algorithm algorithm;
  UpdateRange range;
  float factor;

  ZERO_HOST_DEVICE void element(std::int64_t i) const {
    float p = range.master[i], a = 0, b = 0;
    if constexpr (Algorithm::kSlots > 0) a = range.slots[0][i];
    if constexpr (Algorithm::kSlots > 1) b = range.slots[1][i];
    algorithm(p, a, b, multiply(load(range.gradient, range.gradient_dtype, i), factor));
    range.master[i] = p;
    if constexpr (Algorithm::kSlots > 0) range.slots[0][i] = a;
    if constexpr (Algorithm::kSlots > 1) range.slots[1][i] = b;
    if (range.parameter != nullptr) store(range.parameter, range.parameter_dtype, i, p);
  }
  ZERO_HOST_DEVICE void quad(std::int64_t i) const {
    constexpr auto kF32 = Dtype::F32;
    Quad p = load_quad(range.master, kF32, i), a{}, b{};
    if constexpr (Algorithm::kSlots > 0) a = load_quad(range.slots[0], kF32, i);
    if constexpr (Algorithm::kSlots > 1) b = load_quad(range.slots[1], kF32, i);
    const Quad g = load_quad(range.gradient, range.gradient_dtype, i);
    for (int k = 0; k < kQuad; ++k) algorithm(p.of[k], a.of[k], b.of[k], multiply(g.of[k], factor));
    store_quad(range.master, kF32, i, p);
    if constexpr (Algorithm::kSlots > 0) store_quad(range.slots[0], kF32, i, a);
    if constexpr (Algorithm::kSlots > 1) store_quad(range.slots[1], kF32, i, b);
    if (range.parameter != nullptr) store_quad(range.parameter, range.parameter_dtype, i, p);
  }
};

// Calls run(algorithm) with the rule's algorithm.
template <class Run>
auto with_rule(const UpdateConstants& c, Run&& run) {
  using kernels::Rule;
  switch (c.rule) {
    case Rule::AdamDecoupled:
      return run(Adam<false>(c));
    case Rule::AdamL2:
      return run(Adam<true>(c));
    case Rule::Sgd:
      return run(Sgd<false>(c));
    case Rule::SgdMomentum:
      return run(Sgd<true>(c));
    case Rule::Adagrad:
      return run(Adagrad(c));
    case Rule::Lion:
      break;
  }
  return run(Lion(c));
}

}  // namespace zero::cuda
