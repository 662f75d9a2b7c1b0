// Loads, stores and the fused multiply-add of one SIMD target, with fp32, bf16 and fp16 memory as fp32 vectors.
// Included once per target by files with run-time dispatch, after simd_targets.h. Rounding is done in integers where
// Highway's targets differ: its conversion to bf16 truncates, and its scalar MulAdd rounds twice.
#if defined(ZERO_BASE_SIMD_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef ZERO_BASE_SIMD_INL_H
#undef ZERO_BASE_SIMD_INL_H
#else
#define ZERO_BASE_SIMD_INL_H
#endif

#include <hwy/highway.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/elementwise.h"

HWY_BEFORE_NAMESPACE();
namespace zero::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <Dtype kDtype>
using Stored = std::conditional_t<kDtype == Dtype::F32, float, std::uint16_t>;

using Floats = hn::ScalableTag<float>;
using FloatVector = hn::Vec<Floats>;

// The lanes of a tag, constant on every enabled target.
template <class D>
constexpr std::int64_t lanes(D) {
  return static_cast<std::int64_t>(hn::MaxLanes(D()));
}

#if HWY_TARGET == HWY_SCALAR
// Gives the same results as the F16C instructions of the other targets.
inline float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) {
    const std::uint32_t quiet = rest > 0x7c00u ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | (rest & 0x3ffu) << 13);
  }
  if (rest < 0x400u) {  // a multiple of the smallest subnormal, exact in fp32
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(static_cast<float>(rest) * 0x1p-24f) | sign);
  }
  return std::bit_cast<float>(sign | ((rest << 13) + (112u << 23)));
}

inline std::uint16_t float_to_half(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  const std::uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
  if (rest >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and above round to Inf
  if (rest < 0x38800000u) {  // below 2^-14: the sum's last place is 2^-24, so the adder rounds
    const float sum = std::bit_cast<float>(rest) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(sum) - 0x3f000000u));
  }
  return static_cast<std::uint16_t>(sign | ((rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13));
}
#endif

// hn::Lanes(d) elements as fp32.
template <Dtype kDtype, class D>
HWY_INLINE hn::Vec<D> load(D d, const Stored<kDtype>* from) {
  if constexpr (kDtype == Dtype::F32) {
    return hn::LoadU(d, from);
  } else if constexpr (kDtype == Dtype::BF16) {
    const hn::Rebind<std::uint32_t, D> d32;
    const hn::Rebind<std::uint16_t, D> d16;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))));
  } else {
#if HWY_TARGET == HWY_SCALAR
    return hn::Set(d, half_to_float(*from));
#else
    const hn::Rebind<hwy::float16_t, D> dh;
    const hn::Rebind<std::uint16_t, D> d16;
    return hn::PromoteTo(d, hn::BitCast(dh, hn::LoadU(d16, from)));
#endif
  }
}

template <bool kStream, class D>
HWY_INLINE void write(hn::Vec<D> value, D d, hn::TFromD<D>* to) {
  if constexpr (kStream) {
    hn::Stream(value, d, to);
  } else {
    hn::StoreU(value, d, to);
  }
}

// Rounds to nearest even; NaN becomes a quiet NaN. kStream: bypasses the caches; `to` must be aligned.
template <Dtype kDtype, bool kStream = false, class D>
HWY_INLINE void store(D d, hn::Vec<D> value, Stored<kDtype>* to) {
  if constexpr (kDtype == Dtype::F32) {
    write<kStream>(value, d, to);
  } else if constexpr (kDtype == Dtype::BF16) {
    const hn::Rebind<std::uint32_t, D> d32;
    const hn::Rebind<std::int32_t, D> di32;
    const hn::Rebind<std::uint16_t, D> d16;
    const auto bits = hn::BitCast(d32, value);
    const auto top = hn::ShiftRight<16>(bits);
    const auto odd = hn::And(top, hn::Set(d32, 1u));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fffu))));
    const auto is_nan = hn::RebindMask(d32, hn::IsNaN(value));
    const auto result = hn::IfThenElse(is_nan, hn::Or(top, hn::Set(d32, 0x40u)), rounded);
    write<kStream>(hn::DemoteTo(d16, hn::BitCast(di32, result)), d16, to);
  } else {
#if HWY_TARGET == HWY_SCALAR
    *to = float_to_half(hn::GetLane(value));
#else
    const hn::Rebind<hwy::float16_t, D> dh;
    const hn::Rebind<std::uint16_t, D> d16;
    write<kStream>(hn::BitCast(d16, hn::DemoteTo(dh, value)), d16, to);
#endif
  }
}

// Loads the first `count` < hn::Lanes(d) elements, the others as 0; stores only the first `count`.
template <Dtype kDtype, class D>
HWY_INLINE hn::Vec<D> load_some(D d, const Stored<kDtype>* from, std::int64_t count) {
  Stored<kDtype> padded[hn::MaxLanes(D())] = {};
  std::memcpy(padded, from, static_cast<std::size_t>(count) * sizeof *from);
  return load<kDtype>(d, padded);
}
template <Dtype kDtype, class D>
HWY_INLINE void store_some(D d, hn::Vec<D> value, Stored<kDtype>* to, std::int64_t count) {
  Stored<kDtype> padded[hn::MaxLanes(D())];
  store<kDtype>(d, value, padded);
  std::memcpy(to, padded, static_cast<std::size_t>(count) * sizeof *to);
}

// a * b + c with one rounding.
template <class V>
HWY_INLINE V fma(V a, V b, V c) {
#if HWY_TARGET == HWY_SCALAR
  return V(std::fma(a.raw, b.raw, c.raw));
#else
  return hn::MulAdd(a, b, c);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace zero::kernels
HWY_AFTER_NAMESPACE();

#endif
