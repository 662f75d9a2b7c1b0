// The update rules of kernels/update_simd.cpp for one GPU thread, with the same rounding of every operation. Reads
// gradient, master and optimizer states of one element or four; writes master, states and the low-precision parameter.
// The host can call them too, for tests.
#pragma once
#include "kernels/cuda/arithmetic.h"
#include "kernels/cuda/gradient_rules.h"
#include "kernels/cuda/moment_rules.h"
#include "kernels/update_simd.h"

namespace zero::cuda {

using kernels::UpdateConstants;
using kernels::UpdateRange;

template <class Algorithm>
struct Update {
  Algorithm algorithm;
  UpdateRange range;
  float factor;

  ZERO_HOST_DEVICE void element(std::int64_t i) const {
    float p = range.master[i], a = 0, b = 0, c = 0;
    if constexpr (Algorithm::kSlots > 0) a = range.slots[0][i];
    if constexpr (Algorithm::kSlots > 1) b = range.slots[1][i];
    if constexpr (Algorithm::kSlots > 2) c = range.slots[2][i];
    algorithm(p, a, b, c, multiply(load(range.gradient, range.gradient_dtype, i), factor));
    range.master[i] = p;
    if constexpr (Algorithm::kSlots > 0) range.slots[0][i] = a;
    if constexpr (Algorithm::kSlots > 1) range.slots[1][i] = b;
    if constexpr (Algorithm::kSlots > 2) range.slots[2][i] = c;
    if (range.parameter != nullptr) store(range.parameter, range.parameter_dtype, i, p);
  }
  ZERO_HOST_DEVICE void quad(std::int64_t i) const {
    constexpr auto kF32 = Dtype::F32;
    Quad p = load_quad(range.master, kF32, i), a{}, b{}, c{};
    if constexpr (Algorithm::kSlots > 0) a = load_quad(range.slots[0], kF32, i);
    if constexpr (Algorithm::kSlots > 1) b = load_quad(range.slots[1], kF32, i);
    if constexpr (Algorithm::kSlots > 2) c = load_quad(range.slots[2], kF32, i);
    const Quad g = load_quad(range.gradient, range.gradient_dtype, i);
    for (int k = 0; k < kQuad; ++k) algorithm(p.of[k], a.of[k], b.of[k], c.of[k], multiply(g.of[k], factor));
    store_quad(range.master, kF32, i, p);
    if constexpr (Algorithm::kSlots > 0) store_quad(range.slots[0], kF32, i, a);
    if constexpr (Algorithm::kSlots > 1) store_quad(range.slots[1], kF32, i, b);
    if constexpr (Algorithm::kSlots > 2) store_quad(range.slots[2], kF32, i, c);
    if (range.parameter != nullptr) store_quad(range.parameter, range.parameter_dtype, i, p);
  }
};

// Calls run(algorithm) with the rule's algorithm.
template <class Run>
auto with_rule(const UpdateConstants& c, Run&& run) {
  using kernels::Rule;
  switch (c.rule) {
    case Rule::AdamDecoupled:
      return run(Adam<false, false>(c));
    case Rule::AdamL2:
      return run(Adam<true, false>(c));
    case Rule::AmsgradDecoupled:
      return run(Adam<false, true>(c));
    case Rule::AmsgradL2:
      return run(Adam<true, true>(c));
    case Rule::Sgd:
      return run(Sgd<false>(c));
    case Rule::SgdMomentum:
      return run(Sgd<true>(c));
    case Rule::Adagrad:
      return run(Adagrad(c));
    case Rule::RmsProp:
      return run(RmsProp<false, false>(c));
    case Rule::RmsPropMomentum:
      return run(RmsProp<true, false>(c));
    case Rule::RmsPropCentered:
      return run(RmsProp<false, true>(c));
    case Rule::RmsPropCenteredMomentum:
      return run(RmsProp<true, true>(c));
    case Rule::NAdam:
      return run(NAdam(c));
    case Rule::RAdam:
      return run(RAdam(c));
    case Rule::Adamax:
      return run(Adamax(c));
    case Rule::Adadelta:
      return run(Adadelta(c));
    case Rule::Lion:
      break;
  }
  return run(Lion(c));
}

}  // namespace zero::cuda
