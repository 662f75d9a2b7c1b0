// Stochastic rounding with fp32 vectors, compiled for every SIMD target of kernels/simd_targets.h.
#include "kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rounding_simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "kernels/cuda/random_bits.h"
#include "kernels/rounding_simd.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zero::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = zero::kernels::HWY_NAMESPACE;
using simd::Floats;
using V = simd::FloatVector;
using Words = hn::Rebind<std::uint32_t, Floats>;
using W = hn::Vec<Words>;

HWY_INLINE W mixed(W x) {
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(Words(), 0x7feb352du));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), hn::Set(Words(), 0x846ca68bu));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

void draw_bits(std::uint32_t* out, std::uint64_t key, std::int64_t first_element, std::int64_t numel) {
  constexpr std::int64_t kLanes = simd::lanes(Words());
  const Words d;
  const W low = hn::Set(d, static_cast<std::uint32_t>(key)), high = hn::Set(d, static_cast<std::uint32_t>(key >> 32));
  for (std::int64_t i = 0; i < numel; i += kLanes) {
    const W bits =
        mixed(hn::Add(mixed(hn::Xor(hn::Iota(d, static_cast<std::uint32_t>(first_element + i)), low)), high));
    if (i + kLanes <= numel) {
      hn::StoreU(bits, d, out + i);
    } else {
      std::uint32_t last[hn::MaxLanes(d)];
      hn::StoreU(bits, d, last);
      std::memcpy(out + i, last, static_cast<std::size_t>(numel - i) * sizeof *out);
    }
  }
}

// The 16 bits of a value; which of the four it is.
template <int kValue>
HWY_INLINE W draw(W bits) {
  const W word = kValue < 2 ? bits : mixed(hn::Xor(bits, hn::Set(Words(), cuda::kNextDraw)));
  return kValue % 2 == 0 ? hn::And(word, hn::Set(Words(), 0xffffu)) : hn::ShiftRight<16>(word);
}

// A value that the dtype has, so that a store changes nothing.
HWY_INLINE V to_bf16(V value, W draws) {
  const Words d;
  const W bits = hn::BitCast(d, value);
  const W rounded = hn::And(hn::Add(bits, draws), hn::Set(d, 0xffff0000u));
  return hn::IfThenElse(hn::IsNaN(value), value, hn::BitCast(Floats(), rounded));
}

HWY_INLINE V to_f16(V value, W draws) {
  const Floats f;
  const Words d;
  const V size = hn::Abs(value);
  const W rest = hn::BitCast(d, size);
  const W up = hn::And(hn::Add(rest, hn::ShiftRight<3>(draws)), hn::Set(d, ~0x1fffu));
  const V normal = hn::BitCast(f, hn::Min(up, hn::Set(d, 0x477fe000u)));
  const V scaled = hn::Mul(size, hn::Set(f, 0x1p24f));
  const V whole = hn::Floor(scaled);
  const V below =
      hn::Mul(hn::ConvertTo(f, hn::BitCast(hn::Rebind<std::int32_t, Floats>(), draws)), hn::Set(f, 0x1p-16f));
  const V one_more = hn::IfThenElseZero(hn::Lt(below, hn::Sub(scaled, whole)), hn::Set(f, 1.0f));
  const V small = hn::Mul(hn::Add(whole, one_more), hn::Set(f, 0x1p-24f));
  const V finite = hn::CopySign(hn::IfThenElse(hn::Lt(size, hn::Set(f, 0x1p-14f)), small, normal), value);
  return hn::IfThenElse(hn::Lt(size, hn::Set(f, 65520.0f)), finite, value);
}

template <Dtype kDtype, int kValue>
void round_all(Stored<kDtype>* out, const float* in, const std::uint32_t* bits, std::int64_t numel) {
  constexpr std::int64_t kLanes = simd::lanes(Floats());
  const Floats f;
  const Words d;
  const auto rounded = [](V value, W random) {
    const W draws = draw<kValue>(random);
    return kDtype == Dtype::BF16 ? to_bf16(value, draws) : to_f16(value, draws);
  };
  std::int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes)
    simd::store<kDtype>(f, rounded(hn::LoadU(f, in + i), hn::LoadU(d, bits + i)), out + i);
  if (i == numel) return;
  const auto left = numel - i;
  std::uint32_t last[hn::MaxLanes(d)] = {};
  std::memcpy(last, bits + i, static_cast<std::size_t>(left) * sizeof *last);
  const V value = simd::load_some<Dtype::F32>(f, in + i, left);
  simd::store_some<kDtype>(f, rounded(value, hn::LoadU(d, last)), out + i, left);
}

template <Dtype kDtype>
void round_value(void* out, const float* in, const std::uint32_t* bits, int value, std::int64_t numel) {
  auto* const to = static_cast<Stored<kDtype>*>(out);
  if (value == 0) return round_all<kDtype, 0>(to, in, bits, numel);
  if (value == 1) return round_all<kDtype, 1>(to, in, bits, numel);
  if (value == 2) return round_all<kDtype, 2>(to, in, bits, numel);
  round_all<kDtype, 3>(to, in, bits, numel);
}

void round_stochastically(void* out, Dtype dtype, const float* in, const std::uint32_t* bits, int value,
                          std::int64_t numel) {
  if (dtype == Dtype::BF16) return round_value<Dtype::BF16>(out, in, bits, value, numel);
  round_value<Dtype::F16>(out, in, bits, value, numel);
}

template <Dtype kFrom, Dtype kTo>
void convert_all(Stored<kTo>* out, const Stored<kFrom>* in, std::int64_t numel) {
  constexpr std::int64_t kLanes = simd::lanes(Floats());
  const Floats f;
  std::int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) simd::store<kTo>(f, simd::load<kFrom>(f, in + i), out + i);
  if (i < numel) simd::store_some<kTo>(f, simd::load_some<kFrom>(f, in + i, numel - i), out + i, numel - i);
}

void widen(float* out, const void* in, Dtype dtype, std::int64_t numel) {
  const auto* const from = static_cast<const std::uint16_t*>(in);
  if (dtype == Dtype::BF16) return convert_all<Dtype::BF16, Dtype::F32>(out, from, numel);
  convert_all<Dtype::F16, Dtype::F32>(out, from, numel);
}

void round_to_nearest(void* out, Dtype dtype, const float* in, std::int64_t numel) {
  auto* const to = static_cast<std::uint16_t*>(out);
  if (dtype == Dtype::BF16) return convert_all<Dtype::F32, Dtype::BF16>(to, in, numel);
  convert_all<Dtype::F32, Dtype::F16>(to, in, numel);
}

}  // namespace HWY_NAMESPACE
}  // namespace zero::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zero::kernels {
HWY_EXPORT(draw_bits);
HWY_EXPORT(round_stochastically);
HWY_EXPORT(widen);
HWY_EXPORT(round_to_nearest);
void widen(float* out, const void* in, Dtype dtype, std::int64_t numel) {
  HWY_DYNAMIC_DISPATCH(widen)(out, in, dtype, numel);
}
void round_to_nearest(void* out, Dtype dtype, const float* in, std::int64_t numel) {
  HWY_DYNAMIC_DISPATCH(round_to_nearest)(out, dtype, in, numel);
}
void draw_bits(std::uint32_t* out, std::uint64_t key, std::int64_t first_element, std::int64_t numel) {
  HWY_DYNAMIC_DISPATCH(draw_bits)(out, key, first_element, numel);
}
void round_stochastically(void* out, Dtype dtype, const float* in, const std::uint32_t* bits, int value,
                          std::int64_t numel) {
  HWY_DYNAMIC_DISPATCH(round_stochastically)(out, dtype, in, bits, value, numel);
}
}  // namespace zero::kernels
#endif
