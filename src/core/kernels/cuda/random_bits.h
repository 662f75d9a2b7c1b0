// The bits that decide stochastic rounding, and the rounding of single values, shared by GPU threads and the host.
// rounding-inl.h does the same with vectors, bit for bit.
//
// [Note: random bits] A function of a key (seed, update, parameter) and the element's position in its parameter,
// without a state: the result does not depend on how ranks, tiles and threads divide a parameter.
#pragma once
#include "kernels/cuda/arithmetic.h"

namespace zero::cuda {

// 32 bits for the element: the mixer "lowbias32" of C. Wellons' hash-prospector, with one half of the key before its
// first round and the other between the two.
inline constexpr std::uint32_t kMix1 = 0x7feb352du, kMix2 = 0x846ca68bu;
ZERO_HOST_DEVICE std::uint32_t random_bits(std::uint64_t key, std::int64_t element) {
  auto x = static_cast<std::uint32_t>(element) ^ static_cast<std::uint32_t>(key);
  x = (x ^ x >> 16) * kMix1 + static_cast<std::uint32_t>(key >> 32);
  x = (x ^ x >> 15) * kMix2;
  return x ^ x >> 16;
}

// 16 bits for each of up to four values of an element, independent of each other in pairs: the halves of its 32 bits,
// and the upper halves of their products with odd numbers.
inline constexpr std::uint32_t kThirdDraw = 0x9e3779b9u, kFourthDraw = 0x85ebca6bu;
ZERO_HOST_DEVICE std::uint32_t draw_of(std::uint32_t bits, int value) {
  if (value == 0) return bits & 0xffffu;
  if (value == 2) bits *= kThirdDraw;
  if (value == 3) bits *= kFourthDraw;
  return bits >> 16;
}

// To one of the two nearest values, each with the probability that makes the mean exact to 2^-16 of their distance.
// Infinity stays, NaN stays NaN.
ZERO_HOST_DEVICE std::uint16_t to_bf16_stochastic(float value, std::uint32_t draw) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
  return static_cast<std::uint16_t>((bits + draw) >> 16);
}

// The same; to 2^-13 for normal values. What nearest even makes 65504 does not become infinite.
ZERO_HOST_DEVICE std::uint16_t to_f16_stochastic(float value, std::uint32_t draw) {
  const std::uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest >= 0x477ff000u) return to_f16(value);
  if (rest < 0x38800000u) {  // multiples of 2^-24
    const float scaled = multiply(float_of(rest), 0x1p24f);
    const auto whole = static_cast<std::uint32_t>(scaled);
    const float fraction = subtract(scaled, static_cast<float>(whole));
    return static_cast<std::uint16_t>(sign | (whole + (multiply(static_cast<float>(draw), 0x1p-16f) < fraction)));
  }
  const auto rounded = (rest + (draw >> 3)) >> 13;
  const auto largest = 0x477fe000u >> 13;
  return static_cast<std::uint16_t>(sign | ((rounded < largest ? rounded : largest) - (112u << 10)));
}

// The value number `value` of an element as it is stored. key 0: rounded to nearest even.
ZERO_HOST_DEVICE float as_stored(float number, Dtype dtype, std::uint64_t key, std::uint32_t bits, int value) {
  if (dtype == Dtype::F32) return number;
  const auto draw = draw_of(bits, value);
  if (dtype == Dtype::BF16) return from_bf16(key == 0 ? to_bf16(number) : to_bf16_stochastic(number, draw));
  return from_f16(key == 0 ? to_f16(number) : to_f16_stochastic(number, draw));
}

}  // namespace zero::cuda
