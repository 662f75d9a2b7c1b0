// The update rules with fp32 vectors, compiled for every SIMD target of kernels/simd_targets.h. One pass reads
// gradient, master and optimizer states, and writes master, states and the low-precision parameter.
//
// [Note: order of operations] Adam and SGD round like torch's fused CPU kernels on machines with a fused multiply-add
// (docs/numerics.md), for every element: tails use the same vector code on a padded copy. Shards may therefore be
// divided anywhere, among threads or ranks. Fused multiply-adds are written explicitly; build with -ffp-contract=off.
#include "kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/update_simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/simd-inl.h"
#include "kernels/update_simd.h"

HWY_BEFORE_NAMESPACE();
namespace zero::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = zero::kernels::HWY_NAMESPACE;
using simd::Floats;
using V = simd::FloatVector;
using simd::Stored;

HWY_INLINE V constant(float value) { return hn::Set(Floats(), value); }

// Adam (Kingma and Ba, 1412.6980) with L2 decay, or AdamW (Loshchilov and Hutter, 1711.05101).
template <bool kL2>
struct Adam {
  static constexpr int kSlots = 2;
  V decay, weight1, beta2, new2, root2, eps, negative_step;
  bool has_weight_decay, long_way;
  explicit HWY_INLINE Adam(const UpdateConstants& c)
      : decay(constant(kL2 ? c.weight_decay : c.keep)),
        weight1(constant(c.new1 < 0.5f ? c.new1 : c.new1 - 1)),
        beta2(constant(c.beta2)),
        new2(constant(c.new2)),
        root2(constant(c.root2)),
        eps(constant(c.eps)),
        negative_step(constant(c.negative_step)),
        has_weight_decay(c.has_weight_decay),
        long_way(c.new1 >= 0.5f) {}
  HWY_INLINE void operator()(V& p, V& m, V& v, V g) const {
    if constexpr (kL2) {
      if (has_weight_decay) g = simd::fma(p, decay, g);
    } else {
      p = hn::Mul(p, decay);
    }
    m = simd::fma(weight1, hn::Sub(g, m), long_way ? g : m);
    v = simd::fma(hn::Mul(new2, g), g, hn::Mul(v, beta2));
    const V denominator = hn::Add(hn::Div(hn::Sqrt(v), root2), eps);
    p = hn::Add(p, hn::Div(hn::Mul(negative_step, m), denominator));
  }
};

template <bool kMomentum>
struct Sgd {
  static constexpr int kSlots = kMomentum ? 1 : 0;
  V weight_decay, negative_step, momentum, undamped;
  bool has_weight_decay, first, nesterov;
  explicit HWY_INLINE Sgd(const UpdateConstants& c)
      : weight_decay(constant(c.weight_decay)),
        negative_step(constant(c.negative_step)),
        momentum(constant(c.momentum)),
        undamped(constant(c.undamped)),
        has_weight_decay(c.has_weight_decay),
        first(c.first),
        nesterov(c.nesterov) {}
  HWY_INLINE void operator()(V& p, V& buffer, V&, V g) const {
    if (has_weight_decay) g = simd::fma(p, weight_decay, g);
    if constexpr (kMomentum) {
      buffer = first ? g : simd::fma(g, undamped, hn::Mul(buffer, momentum));
      g = nesterov ? simd::fma(buffer, momentum, g) : buffer;
    }
    p = simd::fma(g, negative_step, p);
  }
};

// Duchi et al., JMLR 12 (2011).
struct Adagrad {
  static constexpr int kSlots = 1;
  V weight_decay, negative_step, eps;
  bool has_weight_decay;
  explicit HWY_INLINE Adagrad(const UpdateConstants& c)
      : weight_decay(constant(c.weight_decay)),
        negative_step(constant(c.negative_step)),
        eps(constant(c.eps)),
        has_weight_decay(c.has_weight_decay) {}
  HWY_INLINE void operator()(V& p, V& sum, V&, V g) const {
    if (has_weight_decay) g = simd::fma(p, weight_decay, g);
    sum = simd::fma(g, g, sum);
    p = hn::Add(p, hn::Div(hn::Mul(negative_step, g), hn::Add(hn::Sqrt(sum), eps)));
  }
};

// Chen et al., 2302.06675. At u = 0 the parameter only decays; NaN propagates to it.
struct Lion {
  static constexpr int kSlots = 1;
  V keep, beta1, new1, beta2, new2, negative_step, step;
  explicit HWY_INLINE Lion(const UpdateConstants& c)
      : keep(constant(c.keep)),
        beta1(constant(c.beta1)),
        new1(constant(c.new1)),
        beta2(constant(c.beta2)),
        new2(constant(c.new2)),
        negative_step(constant(c.negative_step)),
        step(constant(-c.negative_step)) {}
  HWY_INLINE void operator()(V& p, V& m, V&, V g) const {
    const V zero = constant(0.0f);
    const V u = simd::fma(new1, g, hn::Mul(m, beta1));
    const V move = hn::IfThenElse(hn::Gt(u, zero), negative_step, hn::IfThenElse(hn::Lt(u, zero), step, u));
    p = hn::Add(hn::Mul(p, keep), move);
    m = simd::fma(new2, g, hn::Mul(m, beta2));
  }
};

// Processes elements [i, i + lanes) or, for a tail, the first `count` of them.
template <class Algorithm, Dtype kGradient, bool kCopy, Dtype kParameter>
struct Pass {
  const Algorithm& algorithm;
  const UpdateRange& range;
  V factor;

  HWY_INLINE void full(std::int64_t i) const {
    const Floats d;
    V p = hn::LoadU(d, range.master + i);
    V a = p, b = p;  // not read unless loaded
    if constexpr (Algorithm::kSlots > 0) a = hn::LoadU(d, range.slots[0] + i);
    if constexpr (Algorithm::kSlots > 1) b = hn::LoadU(d, range.slots[1] + i);
    const V g = simd::load<kGradient>(d, static_cast<const Stored<kGradient>*>(range.gradient) + i);
    algorithm(p, a, b, hn::Mul(g, factor));
    hn::StoreU(p, d, range.master + i);
    if constexpr (Algorithm::kSlots > 0) hn::StoreU(a, d, range.slots[0] + i);
    if constexpr (Algorithm::kSlots > 1) hn::StoreU(b, d, range.slots[1] + i);
    if constexpr (kCopy) simd::store<kParameter>(d, p, static_cast<Stored<kParameter>*>(range.parameter) + i);
  }

  HWY_INLINE void some(std::int64_t i, std::int64_t count) const {
    const Floats d;
    constexpr auto kF32 = Dtype::F32;
    V p = simd::load_some<kF32>(d, range.master + i, count);
    V a = p, b = p;
    if constexpr (Algorithm::kSlots > 0) a = simd::load_some<kF32>(d, range.slots[0] + i, count);
    if constexpr (Algorithm::kSlots > 1) b = simd::load_some<kF32>(d, range.slots[1] + i, count);
    const V g = simd::load_some<kGradient>(d, static_cast<const Stored<kGradient>*>(range.gradient) + i, count);
    algorithm(p, a, b, hn::Mul(g, factor));
    simd::store_some<kF32>(d, p, range.master + i, count);
    if constexpr (Algorithm::kSlots > 0) simd::store_some<kF32>(d, a, range.slots[0] + i, count);
    if constexpr (Algorithm::kSlots > 1) simd::store_some<kF32>(d, b, range.slots[1] + i, count);
    if constexpr (kCopy)
      simd::store_some<kParameter>(d, p, static_cast<Stored<kParameter>*>(range.parameter) + i, count);
  }
};

template <class Algorithm, Dtype kGradient, bool kCopy, Dtype kParameter>
void pass(const UpdateConstants& constants, const UpdateRange& range, float factor, std::int64_t begin,
          std::int64_t end) {
  constexpr std::int64_t kLanes = simd::lanes(Floats());
  const Algorithm algorithm(constants);
  const Pass<Algorithm, kGradient, kCopy, kParameter> pass{algorithm, range, constant(factor)};
  std::int64_t i = begin;
  // Unrolling and prefetching have no measured effect: the loop is memory-bound (zero bench optimizer).
  for (; i + kLanes <= end; i += kLanes) pass.full(i);
  if (i < end) pass.some(i, end - i);
}

template <class Algorithm, Dtype kGradient>
void pass_of_gradient(const UpdateConstants& c, const UpdateRange& range, float factor, std::int64_t begin,
                      std::int64_t end) {
  if (range.parameter == nullptr) return pass<Algorithm, kGradient, false, Dtype::F32>(c, range, factor, begin, end);
  switch (range.parameter_dtype) {
    case Dtype::F32:
      return pass<Algorithm, kGradient, true, Dtype::F32>(c, range, factor, begin, end);
    case Dtype::BF16:
      return pass<Algorithm, kGradient, true, Dtype::BF16>(c, range, factor, begin, end);
    case Dtype::F16:
      return pass<Algorithm, kGradient, true, Dtype::F16>(c, range, factor, begin, end);
  }
}

template <class Algorithm>
void pass_of(const UpdateConstants& c, const UpdateRange& range, float factor, std::int64_t begin, std::int64_t end) {
  switch (range.gradient_dtype) {
    case Dtype::F32:
      return pass_of_gradient<Algorithm, Dtype::F32>(c, range, factor, begin, end);
    case Dtype::BF16:
      return pass_of_gradient<Algorithm, Dtype::BF16>(c, range, factor, begin, end);
    case Dtype::F16:
      return pass_of_gradient<Algorithm, Dtype::F16>(c, range, factor, begin, end);
  }
}

void update_range(const UpdateConstants& c, const UpdateRange& range, float factor, std::int64_t begin,
                  std::int64_t end) {
  switch (c.rule) {
    case Rule::AdamDecoupled:
      return pass_of<Adam<false>>(c, range, factor, begin, end);
    case Rule::AdamL2:
      return pass_of<Adam<true>>(c, range, factor, begin, end);
    case Rule::Sgd:
      return pass_of<Sgd<false>>(c, range, factor, begin, end);
    case Rule::SgdMomentum:
      return pass_of<Sgd<true>>(c, range, factor, begin, end);
    case Rule::Adagrad:
      return pass_of<Adagrad>(c, range, factor, begin, end);
    case Rule::Lion:
      return pass_of<Lion>(c, range, factor, begin, end);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace zero::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::kernels {
HWY_EXPORT(update_range);
void update_range(const UpdateConstants& c, const UpdateRange& range, float factor, std::int64_t begin,
                  std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(update_range)(c, range, factor, begin, end);
}
}  // namespace zero::kernels
#endif
