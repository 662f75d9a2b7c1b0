// Arithmetic of single elements, shared by GPU threads and the host: reading and writing fp32, bf16 and fp16, and the
// operations of the update rules. nvcc compiles it into the plug-in; g++ compiles it into a test that compares it bit
// for bit with the SIMD kernels on every machine.
//
// [Note: no contraction] Each operation rounds once; fused operations are written as fused_multiply_add. Device code
// uses intrinsics, which ignore compiler flags; host code requires -ffp-contract=off.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/elementwise.h"

#ifdef __CUDACC__
#include <cuda_fp16.h>
#define ZERO_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ZERO_HOST_DEVICE inline
#endif

namespace zero::cuda {

using kernels::Dtype;

ZERO_HOST_DEVICE std::uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

ZERO_HOST_DEVICE float float_of(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

ZERO_HOST_DEVICE std::uint64_t bits_of(double value) {
  std::uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

ZERO_HOST_DEVICE double double_of(std::uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

#ifdef __CUDA_ARCH__
ZERO_HOST_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
ZERO_HOST_DEVICE float subtract(float a, float b) { return __fsub_rn(a, b); }
ZERO_HOST_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
ZERO_HOST_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
ZERO_HOST_DEVICE float square_root(float a) { return __fsqrt_rn(a); }
ZERO_HOST_DEVICE float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
ZERO_HOST_DEVICE double add(double a, double b) { return __dadd_rn(a, b); }
ZERO_HOST_DEVICE double multiply(double a, double b) { return __dmul_rn(a, b); }
ZERO_HOST_DEVICE double divide(double a, double b) { return __ddiv_rn(a, b); }
ZERO_HOST_DEVICE double square_root(double a) { return __dsqrt_rn(a); }
ZERO_HOST_DEVICE double fused_multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }
#else
ZERO_HOST_DEVICE float add(float a, float b) { return a + b; }
ZERO_HOST_DEVICE float subtract(float a, float b) { return a - b; }
ZERO_HOST_DEVICE float multiply(float a, float b) { return a * b; }
ZERO_HOST_DEVICE float divide(float a, float b) { return a / b; }
ZERO_HOST_DEVICE float square_root(float a) { return std::sqrt(a); }
ZERO_HOST_DEVICE float fused_multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
ZERO_HOST_DEVICE double add(double a, double b) { return a + b; }
ZERO_HOST_DEVICE double multiply(double a, double b) { return a * b; }
ZERO_HOST_DEVICE double divide(double a, double b) { return a / b; }
ZERO_HOST_DEVICE double square_root(double a) { return std::sqrt(a); }
ZERO_HOST_DEVICE double fused_multiply_add(double a, double b, double c) { return std::fma(a, b, c); }
#endif

// --- 16-bit memory: read exactly, written with one round-to-nearest-even; NaN stays NaN ---

ZERO_HOST_DEVICE float from_bf16(std::uint16_t stored) { return float_of(static_cast<std::uint32_t>(stored) << 16); }

ZERO_HOST_DEVICE std::uint16_t to_bf16(float value) {
  const std::uint32_t bits = bits_of(value), top = bits >> 16;
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(top | 0x40u);
  return static_cast<std::uint16_t>((bits + (top & 1u) + 0x7fffu) >> 16);
}

ZERO_HOST_DEVICE float from_f16(std::uint16_t stored) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(stored));  // one instruction, exact
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(stored & 0x8000u) << 16, rest = stored & 0x7fffu;
  if (rest >= 0x7c00u) {
    const std::uint32_t quiet = rest > 0x7c00u ? 0x400000u : 0u;
    return float_of(sign | 0x7f800000u | quiet | (rest & 0x3ffu) << 13);
  }
  if (rest < 0x400u)  // a multiple of the smallest subnormal, exact in fp32
    return float_of(bits_of(multiply(static_cast<float>(rest), 0x1p-24f)) | sign);
  return float_of(sign | ((rest << 13) + (112u << 23)));
#endif
}

ZERO_HOST_DEVICE std::uint16_t to_f16(float value) {
  const std::uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
  if (rest >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and above round to Inf
  if (rest < 0x38800000u)  // below 2^-14: the sum's last place is 2^-24, so the adder rounds
    return static_cast<std::uint16_t>(sign | (bits_of(add(float_of(rest), 0.5f)) - 0x3f000000u));
  return static_cast<std::uint16_t>(sign | ((rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13));
}

// --- elements and quads of elements of a range; the dtype is the same for all threads of a launch ---

ZERO_HOST_DEVICE float load(const void* data, Dtype dtype, std::int64_t i) {
  if (dtype == Dtype::F32) return static_cast<const float*>(data)[i];
  const std::uint16_t stored = static_cast<const std::uint16_t*>(data)[i];
  return dtype == Dtype::BF16 ? from_bf16(stored) : from_f16(stored);
}

ZERO_HOST_DEVICE void store(void* data, Dtype dtype, std::int64_t i, float value) {
  if (dtype == Dtype::F32)
    static_cast<float*>(data)[i] = value;
  else
    static_cast<std::uint16_t*>(data)[i] = dtype == Dtype::BF16 ? to_bf16(value) : to_f16(value);
}

inline constexpr int kQuad = 4;

struct Quad {
  float of[kQuad];
};

struct alignas(16) StoredQuad32 {
  float of[kQuad];
};
struct alignas(8) StoredQuad16 {
  std::uint16_t of[kQuad];
};

// Requires i divisible by 4 and data aligned to 4 elements: one access of 16 or 8 bytes.
ZERO_HOST_DEVICE Quad load_quad(const void* data, Dtype dtype, std::int64_t i) {
  Quad quad;
  if (dtype == Dtype::F32) {
    const auto stored = static_cast<const StoredQuad32*>(data)[i / kQuad];
    for (int k = 0; k < kQuad; ++k) quad.of[k] = stored.of[k];
  } else {
    const auto stored = static_cast<const StoredQuad16*>(data)[i / kQuad];
    for (int k = 0; k < kQuad; ++k)
      quad.of[k] = dtype == Dtype::BF16 ? from_bf16(stored.of[k]) : from_f16(stored.of[k]);
  }
  return quad;
}

ZERO_HOST_DEVICE void store_quad(void* data, Dtype dtype, std::int64_t i, const Quad& quad) {
  if (dtype == Dtype::F32) {
    StoredQuad32 stored;
    for (int k = 0; k < kQuad; ++k) stored.of[k] = quad.of[k];
    static_cast<StoredQuad32*>(data)[i / kQuad] = stored;
  } else {
    StoredQuad16 stored;
    for (int k = 0; k < kQuad; ++k) stored.of[k] = dtype == Dtype::BF16 ? to_bf16(quad.of[k]) : to_f16(quad.of[k]);
    static_cast<StoredQuad16*>(data)[i / kQuad] = stored;
  }
}

// Whether all bits of the exponent are set.
ZERO_HOST_DEVICE bool non_finite(const void* data, Dtype dtype, std::int64_t i) {
  if (dtype == Dtype::F32) return (bits_of(static_cast<const float*>(data)[i]) & 0x7f800000u) == 0x7f800000u;
  const std::uint32_t exponent = dtype == Dtype::BF16 ? 0x7f80u : 0x7c00u;
  return (static_cast<const std::uint16_t*>(data)[i] & exponent) == exponent;
}

}  // namespace zero::cuda
