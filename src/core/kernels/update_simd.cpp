// The update rules with fp32 vectors, compiled for every SIMD target of kernels/simd_targets.h. One pass reads
// gradient, master and optimizer states, and writes master, states and the low-precision parameter; those of 16 and 8
// bits too.
//
// [Note: order of operations] Adam and SGD round like torch's fused CPU kernels on machines with a fused multiply-add
// (docs/numerics.md), for every element: tails use the same vector code on a padded copy. Shards may therefore be
// divided anywhere, among threads or ranks. Fused multiply-adds are written explicitly; build with -ffp-contract=off.
#include "kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/update_simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "kernels/blocks8-inl.h"
#include "kernels/rounding-inl.h"
#include "kernels/simd-inl.h"
#include "kernels/update_parts.h"
#include "kernels/update_simd.h"

HWY_BEFORE_NAMESPACE();
namespace zero::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = zero::kernels::HWY_NAMESPACE;
using simd::Floats;
using V = simd::FloatVector;
using simd::Stored;

constexpr std::int64_t kLanes = simd::lanes(Floats());

HWY_INLINE V constant(float value) { return hn::Set(Floats(), value); }
// a if it is larger, else b.
HWY_INLINE V larger(V a, V b) { return hn::IfThenElse(hn::Gt(a, b), a, b); }
// m + weight (g - m), as torch's lerp.
HWY_INLINE V lerp(V m, V g, V weight, bool long_way) {
  return simd::fma(long_way ? hn::Sub(weight, constant(1.0f)) : weight, hn::Sub(g, m), long_way ? g : m);
}

// Adam (Kingma and Ba, 1412.6980) with L2 decay, or AdamW (Loshchilov and Hutter, 1711.05101).
// With the largest second moment so far: Reddi et al., 1904.09237.
template <bool kL2, bool kAmsgrad>
struct Adam {
  static constexpr int kSlots = kAmsgrad ? 3 : 2;
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
  HWY_INLINE void operator()(V& p, V& m, V& v, V& largest, V g) const {
    if constexpr (kL2) {
      if (has_weight_decay) g = simd::fma(p, decay, g);
    } else {
      p = hn::Mul(p, decay);
    }
    V from = m;
    if (long_way) from = g;
    m = simd::fma(weight1, hn::Sub(g, m), from);
    v = simd::fma(hn::Mul(new2, g), g, hn::Mul(v, beta2));
    if constexpr (kAmsgrad) largest = larger(largest, v);
    const V denominator = hn::Add(hn::Div(hn::Sqrt(kAmsgrad ? largest : v), root2), eps);
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
  HWY_INLINE void operator()(V& p, V& buffer, V&, V&, V g) const {
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
  HWY_INLINE void operator()(V& p, V& sum, V&, V&, V g) const {
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
  HWY_INLINE void operator()(V& p, V& m, V&, V&, V g) const {
    const V zero = constant(0.0f);
    const V u = simd::fma(new1, g, hn::Mul(m, beta1));
    const V move = hn::IfThenElse(hn::Gt(u, zero), negative_step, hn::IfThenElse(hn::Lt(u, zero), step, u));
    p = hn::Add(hn::Mul(p, keep), move);
    m = simd::fma(new2, g, hn::Mul(m, beta2));
  }
};

// Tieleman and Hinton, lecture 6.5 (2012); with the mean gradient, Graves, 1308.0850. The states are in torch's order.
template <bool kMomentum, bool kCentered>
struct RmsProp {
  static constexpr int kSlots = 1 + kMomentum + kCentered;
  V weight_decay, negative_step, eps, momentum, alpha, rest;
  bool has_weight_decay;
  explicit HWY_INLINE RmsProp(const UpdateConstants& c)
      : weight_decay(constant(c.weight_decay)),
        negative_step(constant(c.negative_step)),
        eps(constant(c.eps)),
        momentum(constant(c.momentum)),
        alpha(constant(c.beta2)),
        rest(constant(c.new2)),
        has_weight_decay(c.has_weight_decay),
        long_way_(c.new2 >= 0.5f) {}
  HWY_INLINE void operator()(V& p, V& square, V& second, V& third, V g) const {
    if (has_weight_decay) g = simd::fma(p, weight_decay, g);
    square = simd::fma(hn::Mul(rest, g), g, hn::Mul(square, alpha));
    V variance = square;
    if constexpr (kCentered) {
      V& mean = kMomentum ? third : second;
      mean = lerp(mean, g, rest, long_way_);
      variance = simd::fma(hn::Neg(mean), mean, square);
    }
    const V step = hn::Div(g, hn::Add(hn::Sqrt(variance), eps));
    if constexpr (kMomentum) {
      second = simd::fma(second, momentum, step);
      p = simd::fma(second, negative_step, p);
    } else {
      p = simd::fma(step, negative_step, p);
    }
  }

 private:
  bool long_way_;
};

// What NAdam and RAdam have in common with Adam.
struct Moments {
  V decay, keep, new1, beta2, new2;
  bool has_weight_decay, decoupled, long_way;
  explicit HWY_INLINE Moments(const UpdateConstants& c)
      : decay(constant(c.weight_decay)),
        keep(constant(c.keep)),
        new1(constant(c.new1)),
        beta2(constant(c.beta2)),
        new2(constant(c.new2)),
        has_weight_decay(c.has_weight_decay),
        decoupled(c.decoupled),
        long_way(c.new1 >= 0.5f) {}
  HWY_INLINE void update(V& p, V& m, V& v, V& g) const {
    if (has_weight_decay && decoupled) p = hn::Mul(p, keep);
    if (has_weight_decay && !decoupled) g = simd::fma(p, decay, g);
    m = lerp(m, g, new1, long_way);
    v = simd::fma(hn::Mul(new2, g), g, hn::Mul(v, beta2));
  }
};

// Dozat, ICLR 2016 workshop.
struct NAdam {
  static constexpr int kSlots = 2;
  Moments moments;
  V correction2, eps, negative_step, moment_step;
  explicit HWY_INLINE NAdam(const UpdateConstants& c)
      : moments(c),
        correction2(constant(c.correction2)),
        eps(constant(c.eps)),
        negative_step(constant(c.negative_step)),
        moment_step(constant(c.moment_step)) {}
  HWY_INLINE void operator()(V& p, V& m, V& v, V&, V g) const {
    moments.update(p, m, v, g);
    const V denominator = hn::Add(hn::Sqrt(hn::Div(v, correction2)), eps);
    p = hn::Add(p, hn::Div(hn::Mul(negative_step, g), denominator));
    p = hn::Add(p, hn::Div(hn::Mul(moment_step, m), denominator));
  }
};

// Liu et al., 1908.03265.
struct RAdam {
  static constexpr int kSlots = 2;
  Moments moments;
  V eps, negative_step;
  bool adaptive;
  explicit HWY_INLINE RAdam(const UpdateConstants& c)
      : moments(c), eps(constant(c.eps)), negative_step(constant(c.negative_step)), adaptive(c.adaptive) {}
  HWY_INLINE void operator()(V& p, V& m, V& v, V&, V g) const {
    moments.update(p, m, v, g);
    const V step = hn::Mul(negative_step, m);
    p = hn::Add(p, adaptive ? hn::Div(step, hn::Add(hn::Sqrt(v), eps)) : step);
  }
};

// Kingma and Ba, 1412.6980, section 7.1.
struct Adamax {
  static constexpr int kSlots = 2;
  V weight_decay, new1, beta2, eps, negative_step;
  bool has_weight_decay, long_way;
  explicit HWY_INLINE Adamax(const UpdateConstants& c)
      : weight_decay(constant(c.weight_decay)),
        new1(constant(c.new1)),
        beta2(constant(c.beta2)),
        eps(constant(c.eps)),
        negative_step(constant(c.negative_step)),
        has_weight_decay(c.has_weight_decay),
        long_way(c.new1 >= 0.5f) {}
  HWY_INLINE void operator()(V& p, V& m, V& norm, V&, V g) const {
    if (has_weight_decay) g = simd::fma(p, weight_decay, g);
    m = lerp(m, g, new1, long_way);
    norm = larger(hn::Mul(norm, beta2), hn::Add(hn::Abs(g), eps));
    p = hn::Add(p, hn::Div(hn::Mul(negative_step, m), norm));
  }
};

// Zeiler, 1212.5701.
struct Adadelta {
  static constexpr int kSlots = 2;
  V weight_decay, rho, rest, eps, negative_step;
  bool has_weight_decay;
  explicit HWY_INLINE Adadelta(const UpdateConstants& c)
      : weight_decay(constant(c.weight_decay)),
        rho(constant(c.beta2)),
        rest(constant(c.new2)),
        eps(constant(c.eps)),
        negative_step(constant(c.negative_step)),
        has_weight_decay(c.has_weight_decay) {}
  HWY_INLINE void operator()(V& p, V& square, V& moved, V&, V g) const {
    if (has_weight_decay) g = simd::fma(p, weight_decay, g);
    square = simd::fma(hn::Mul(rest, g), g, hn::Mul(square, rho));
    const V step = hn::Mul(hn::Div(hn::Sqrt(hn::Add(moved, eps)), hn::Sqrt(hn::Add(square, eps))), g);
    moved = simd::fma(hn::Mul(rest, step), step, hn::Mul(moved, rho));
    p = simd::fma(step, negative_step, p);
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
    V p = hn::LoadU(d, master() + i);
    V a = p, b = p, c = p;  // not read unless loaded
    if constexpr (Algorithm::kSlots > 0) a = hn::LoadU(d, slot(0) + i);
    if constexpr (Algorithm::kSlots > 1) b = hn::LoadU(d, slot(1) + i);
    if constexpr (Algorithm::kSlots > 2) c = hn::LoadU(d, slot(2) + i);
    const V g = simd::load<kGradient>(d, static_cast<const Stored<kGradient>*>(range.gradient) + i);
    algorithm(p, a, b, c, hn::Mul(g, factor));
    hn::StoreU(p, d, master() + i);
    if constexpr (Algorithm::kSlots > 0) hn::StoreU(a, d, slot(0) + i);
    if constexpr (Algorithm::kSlots > 1) hn::StoreU(b, d, slot(1) + i);
    if constexpr (Algorithm::kSlots > 2) hn::StoreU(c, d, slot(2) + i);
    if constexpr (kCopy) simd::store<kParameter>(d, p, static_cast<Stored<kParameter>*>(range.parameter) + i);
  }

  HWY_INLINE void some(std::int64_t i, std::int64_t count) const {
    const Floats d;
    constexpr auto kF32 = Dtype::F32;
    V p = simd::load_some<kF32>(d, master() + i, count);
    V a = p, b = p, c = p;
    if constexpr (Algorithm::kSlots > 0) a = simd::load_some<kF32>(d, slot(0) + i, count);
    if constexpr (Algorithm::kSlots > 1) b = simd::load_some<kF32>(d, slot(1) + i, count);
    if constexpr (Algorithm::kSlots > 2) c = simd::load_some<kF32>(d, slot(2) + i, count);
    const V g = simd::load_some<kGradient>(d, static_cast<const Stored<kGradient>*>(range.gradient) + i, count);
    algorithm(p, a, b, c, hn::Mul(g, factor));
    simd::store_some<kF32>(d, p, master() + i, count);
    if constexpr (Algorithm::kSlots > 0) simd::store_some<kF32>(d, a, slot(0) + i, count);
    if constexpr (Algorithm::kSlots > 1) simd::store_some<kF32>(d, b, slot(1) + i, count);
    if constexpr (Algorithm::kSlots > 2) simd::store_some<kF32>(d, c, slot(2) + i, count);
    if constexpr (kCopy)
      simd::store_some<kParameter>(d, p, static_cast<Stored<kParameter>*>(range.parameter) + i, count);
  }

 private:
  HWY_INLINE float* master() const { return static_cast<float*>(range.master); }
  HWY_INLINE float* slot(int k) const { return static_cast<float*>(range.slots[k]); }
};

template <class Algorithm, Dtype kGradient, bool kCopy, Dtype kParameter>
void pass(const UpdateConstants& constants, const UpdateRange& range, float factor, std::int64_t begin,
          std::int64_t end) {
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

// One vector with masters and states of fewer bits, opened and rounded in registers, by dtypes known at run time.
// Slots: how states are held.
template <class Algorithm, class Slots>
HWY_INLINE void update_stored(const Algorithm& algorithm, const UpdateRange& range, V factor,
                              const simd::Rounding& rounding, Slots& slots, std::int64_t i) {
  V p = simd::load_any(range.master_dtype, range.master, i);
  V a = p, b = p, c = p;  // not read unless loaded
  if constexpr (Algorithm::kSlots > 0) a = slots.template open<0>(i);
  if constexpr (Algorithm::kSlots > 1) b = slots.template open<1>(i);
  if constexpr (Algorithm::kSlots > 2) c = slots.template open<2>(i);
  algorithm(p, a, b, c, hn::Mul(simd::load_any(range.gradient_dtype, range.gradient, i), factor));
  const auto bits = rounding.bits(range.first_element + i);
  rounding.store<0>(range.master_dtype, p, bits, range.master, i);
  if constexpr (Algorithm::kSlots > 0) slots.template store<0>(a, rounding, bits, i);
  if constexpr (Algorithm::kSlots > 1) slots.template store<1>(b, rounding, bits, i);
  if constexpr (Algorithm::kSlots > 2) slots.template store<2>(c, rounding, bits, i);
  if (range.parameter == nullptr) return;
  // What the next update begins with.
  if (range.master_dtype != Dtype::F32) p = simd::load_any(range.master_dtype, range.master, i);
  simd::store_any(range.parameter_dtype, p, range.parameter, i);
}

// States of one dtype.
struct PlainSlots {
  const UpdateRange& range;
  template <int kSlot>
  HWY_INLINE V open(std::int64_t i) const {
    return simd::load_any(range.slot_dtype, range.slots[kSlot], i);
  }
  template <int kSlot>
  HWY_INLINE void store(V value, const simd::Rounding& rounding, simd::WordVector bits, std::int64_t i) const {
    rounding.store<1 + kSlot>(range.slot_dtype, value, bits, range.slots[kSlot], i);
  }
};

// Reads and writes whole vectors.
template <class Algorithm>
void update_plain(const UpdateConstants& constants, const UpdateRange& of, float factor, std::int64_t numel) {
  const UpdateRange range = of;  // a local variable, as all that a vector needs: no store in the loop can change it
  const Algorithm algorithm(constants);
  const simd::Rounding rounding(range.key);
  const PlainSlots slots{range};
  for (std::int64_t i = 0; i < numel; i += kLanes)
    update_stored(algorithm, range, constant(factor), rounding, slots, i);
}

// One state in blocks. A new value waits in fp32 until its block's maximum is known. It is encoded while the next block
// is updated: processors do both at once, since the divisions leave most of their units free.
template <int kSlot>
struct BlockSlot {
  using Decoder = simd::BlockDecoder<state_map(kSlot)>;
  using Encoder = simd::BlockEncoder<state_map(kSlot)>;
  float* values;
  std::uint8_t *codes, *waiting;
  Decoder decoder{0};
  Encoder encoder{1};
  V next = constant(0);
  simd::LargestMagnitude largest;

  HWY_INLINE void begin(const UpdateRange& range, std::int64_t i) {
    auto* const block = static_cast<char*>(range.slots[kSlot]) + state_block_bytes(i);
    float maximum = 0;
    std::memcpy(&maximum, block, sizeof maximum);
    codes = reinterpret_cast<std::uint8_t*>(block) + sizeof maximum;
    decoder = Decoder(maximum);
    next = decoder(codes);
    largest = simd::LargestMagnitude();
  }
  // Also opens the vector after it, so that the arithmetic does not wait.
  HWY_INLINE V open(std::int64_t i) {
    const V value = next;
    next = decoder(codes + (i + kLanes) % kStateBlock);
    return value;
  }
  HWY_INLINE void store(V value, std::int64_t i) {
    const V size = largest.add(value);
    hn::StoreU(state_map(kSlot) == CodeMap::Signed ? value : size, Floats(), values + i % kStateBlock);
  }
  HWY_INLINE void encode(std::int64_t i) const {
    if (waiting != nullptr) encoder(waiting + i, hn::LoadU(Floats(), values + i));
  }
  HWY_INLINE void end() {
    const float maximum = largest.maximum();
    std::memcpy(codes - sizeof maximum, &maximum, sizeof maximum);
    encoder = Encoder(maximum);
    waiting = maximum > 0 ? codes : nullptr;
    if (waiting == nullptr) std::memset(codes, 0, kStateBlock);
  }
};

template <int kSlots>
struct BlockSlots {
  std::int64_t numel;
  BlockSlot<0> first;
  BlockSlot<1> second;
  BlockSlot<2> third;
  template <int kSlot>
  HWY_INLINE auto& slot() {
    if constexpr (kSlot == 0) return first;
    if constexpr (kSlot == 1) return second;
    if constexpr (kSlot == 2) return third;
  }
  template <int kSlot>
  HWY_INLINE V open(std::int64_t i) {
    return slot<kSlot>().open(i);
  }
  // What lies behind the last element has code 0.
  template <int kSlot>
  HWY_INLINE void store(V value, const simd::Rounding&, simd::WordVector, std::int64_t i) {
    if (i + kLanes > numel) {
      const auto left = static_cast<std::size_t>(std::max(numel - i, std::int64_t{0}));
      value = hn::IfThenElseZero(hn::FirstN(Floats(), left), value);
    }
    slot<kSlot>().store(value, i);
  }
  HWY_INLINE void begin(const UpdateRange& range, std::int64_t i) {
    if constexpr (kSlots > 0) first.begin(range, i);
    if constexpr (kSlots > 1) second.begin(range, i);
    if constexpr (kSlots > 2) third.begin(range, i);
  }
  HWY_INLINE void encode(std::int64_t i) const {
    if constexpr (kSlots > 0) first.encode(i);
    if constexpr (kSlots > 1) second.encode(i);
    if constexpr (kSlots > 2) third.encode(i);
  }
  HWY_INLINE void end() {
    if constexpr (kSlots > 0) first.end();
    if constexpr (kSlots > 1) second.end();
    if constexpr (kSlots > 2) third.end();
  }
};

// Reads and writes whole blocks.
template <class Algorithm>
void update_blocks(const UpdateConstants& constants, const UpdateRange& of, float factor, std::int64_t numel) {
  const UpdateRange range = of;
  const Algorithm algorithm(constants);
  const simd::Rounding rounding(range.key);
  alignas(64) float values[kMostSlots][kStateBlock];
  BlockSlots<Algorithm::kSlots> slots{};
  slots.numel = numel;
  slots.first.values = values[0], slots.second.values = values[1], slots.third.values = values[2];
  for (std::int64_t block = 0; block < numel; block += kStateBlock) {
    slots.begin(range, block);
    for (std::int64_t i = 0; i < kStateBlock; i += kLanes) {
      slots.encode(i);
      update_stored(algorithm, range, constant(factor), rounding, slots, block + i);
    }
    slots.end();
  }
  for (std::int64_t i = 0; i < kStateBlock; i += kLanes) slots.encode(i);
}

template <class Algorithm>
void update_all(const UpdateConstants& c, const UpdateRange& range, float factor, std::int64_t numel) {
  const bool in_blocks = range.slots_in_blocks && Algorithm::kSlots > 0;
  const auto update = [&](const UpdateRange& part, std::int64_t count) {
    if (in_blocks) return update_blocks<Algorithm>(c, part, factor, count);
    update_plain<Algorithm>(c, part, factor, count);
  };
  const auto whole = numel - numel % (in_blocks ? kStateBlock : kLanes);
  if (whole > 0) update(range, whole);
  if (whole == numel) return;
  with_room<kStateBlock>(rest_of(range, whole), numel - whole,
                         [&](const UpdateRange& part) { update(part, numel - whole); });
}

template <class Run>
void with_rule(Rule rule, const Run& run) {
  switch (rule) {
    case Rule::AdamDecoupled:
      return run.template operator()<Adam<false, false>>();
    case Rule::AdamL2:
      return run.template operator()<Adam<true, false>>();
    case Rule::AmsgradDecoupled:
      return run.template operator()<Adam<false, true>>();
    case Rule::AmsgradL2:
      return run.template operator()<Adam<true, true>>();
    case Rule::Sgd:
      return run.template operator()<Sgd<false>>();
    case Rule::SgdMomentum:
      return run.template operator()<Sgd<true>>();
    case Rule::Adagrad:
      return run.template operator()<Adagrad>();
    case Rule::Lion:
      return run.template operator()<Lion>();
    case Rule::RmsProp:
      return run.template operator()<RmsProp<false, false>>();
    case Rule::RmsPropMomentum:
      return run.template operator()<RmsProp<true, false>>();
    case Rule::RmsPropCentered:
      return run.template operator()<RmsProp<false, true>>();
    case Rule::RmsPropCenteredMomentum:
      return run.template operator()<RmsProp<true, true>>();
    case Rule::NAdam:
      return run.template operator()<NAdam>();
    case Rule::RAdam:
      return run.template operator()<RAdam>();
    case Rule::Adamax:
      return run.template operator()<Adamax>();
    case Rule::Adadelta:
      return run.template operator()<Adadelta>();
  }
}

void update_fp32_range(const UpdateConstants& c, const UpdateRange& range, float factor, std::int64_t begin,
                       std::int64_t end) {
  with_rule(c.rule, [&]<class Algorithm>() { pass_of<Algorithm>(c, range, factor, begin, end); });
}

void update_stored_range(const UpdateConstants& c, const UpdateRange& range, float factor, std::int64_t begin,
                         std::int64_t end) {
  with_rule(c.rule, [&]<class Algorithm>() { update_all<Algorithm>(c, rest_of(range, begin), factor, end - begin); });
}

}  // namespace HWY_NAMESPACE
}  // namespace zero::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::kernels {
HWY_EXPORT(update_fp32_range);
HWY_EXPORT(update_stored_range);
void update_fp32_range(const UpdateConstants& c, const UpdateRange& range, float factor, std::int64_t begin,
                       std::int64_t end) {
  HWY_DYNAMIC_DISPATCH(update_fp32_range)(c, range, factor, begin, end);
}
void update_range(const UpdateConstants& c, const UpdateRange& range, float factor, std::int64_t begin,
                  std::int64_t end) {
  if (range.is_fp32()) return update_fp32_range(c, range, factor, begin, end);
  HWY_DYNAMIC_DISPATCH(update_stored_range)(c, range, factor, begin, end);
}
}  // namespace zero::kernels
#endif
