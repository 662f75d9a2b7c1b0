// The update rules of kernels/update_simd.cpp for one GPU thread, with the same rounding of every operation. Reads
// gradient, master and optimizer states of one element or four; writes master, states and the low-precision parameter.
// The host can call them too, for tests.
#pragma once
#include "kernels/cuda/arithmetic.h"
#include "kernels/cuda/gradient_rules.h"
#include "kernels/cuda/moment_rules.h"
#include "kernels/cuda/random_bits.h"
#include "kernels/update_simd.h"

namespace zero::cuda {

using kernels::UpdateConstants;
using kernels::UpdateRange;

// An algorithm whose masters or states are stored in 16 bits. fp32 states have kernels of their own, which do not ask
// for the dtype.
template <class Algorithm>
struct Narrow : Algorithm {
  explicit Narrow(const Algorithm& algorithm) : Algorithm(algorithm) {}
};
template <class Algorithm>
inline constexpr bool kIsNarrow = false;
template <class Algorithm>
inline constexpr bool kIsNarrow<Narrow<Algorithm>> = true;

template <class Algorithm>
struct Update {
  Algorithm algorithm;
  UpdateRange range;
  float factor;

  ZERO_HOST_DEVICE void element(std::int64_t i) const {
    float p = load(range.master, master_dtype(), i), a = 0, b = 0, c = 0;
    if constexpr (Algorithm::kSlots > 0) a = load(range.slots[0], slot_dtype(), i);
    if constexpr (Algorithm::kSlots > 1) b = load(range.slots[1], slot_dtype(), i);
    if constexpr (Algorithm::kSlots > 2) c = load(range.slots[2], slot_dtype(), i);
    algorithm(p, a, b, c, multiply(load(range.gradient, range.gradient_dtype, i), factor));
    if constexpr (kIsNarrow<Algorithm>) round(i, p, a, b, c);
    store(range.master, master_dtype(), i, p);
    if constexpr (Algorithm::kSlots > 0) store(range.slots[0], slot_dtype(), i, a);
    if constexpr (Algorithm::kSlots > 1) store(range.slots[1], slot_dtype(), i, b);
    if constexpr (Algorithm::kSlots > 2) store(range.slots[2], slot_dtype(), i, c);
    if (range.parameter != nullptr) store(range.parameter, range.parameter_dtype, i, p);
  }
  ZERO_HOST_DEVICE void quad(std::int64_t i) const {
    Quad p = load_quad(range.master, master_dtype(), i), a{}, b{}, c{};
    if constexpr (Algorithm::kSlots > 0) a = load_quad(range.slots[0], slot_dtype(), i);
    if constexpr (Algorithm::kSlots > 1) b = load_quad(range.slots[1], slot_dtype(), i);
    if constexpr (Algorithm::kSlots > 2) c = load_quad(range.slots[2], slot_dtype(), i);
    const Quad g = load_quad(range.gradient, range.gradient_dtype, i);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int k = 0; k < kQuad; ++k) {
      algorithm(p.of[k], a.of[k], b.of[k], c.of[k], multiply(g.of[k], factor));
      if constexpr (kIsNarrow<Algorithm>) round(i + k, p.of[k], a.of[k], b.of[k], c.of[k]);
    }
    store_quad(range.master, master_dtype(), i, p);
    if constexpr (Algorithm::kSlots > 0) store_quad(range.slots[0], slot_dtype(), i, a);
    if constexpr (Algorithm::kSlots > 1) store_quad(range.slots[1], slot_dtype(), i, b);
    if constexpr (Algorithm::kSlots > 2) store_quad(range.slots[2], slot_dtype(), i, c);
    if (range.parameter != nullptr) store_quad(range.parameter, range.parameter_dtype, i, p);
  }

 private:
  ZERO_HOST_DEVICE Dtype master_dtype() const { return kIsNarrow<Algorithm> ? range.master_dtype : Dtype::F32; }
  ZERO_HOST_DEVICE Dtype slot_dtype() const { return kIsNarrow<Algorithm> ? range.slot_dtype : Dtype::F32; }
  ZERO_HOST_DEVICE void round(std::int64_t i, float& p, float& a, float& b, float& c) const {
    const auto bits = random_bits(range.key, range.first_element + i);
    p = as_stored(p, range.master_dtype, range.key, bits, 0);
    if constexpr (Algorithm::kSlots > 0) a = as_stored(a, range.slot_dtype, range.key, bits, 1);
    if constexpr (Algorithm::kSlots > 1) b = as_stored(b, range.slot_dtype, range.key, bits, 2);
    if constexpr (Algorithm::kSlots > 2) c = as_stored(c, range.slot_dtype, range.key, bits, 3);
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
