// The loops of fused_loops.h, without torch: plain C++ that the compiler vectorizes for several kinds of processors.
// Build with -ffp-contract=off: of the three clones, two would have fused multiply-adds, the default one not.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "models/fused_loops.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define MODELS_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3")))
#else
#define MODELS_CLONES
#endif
#define MODELS_INLINE inline __attribute__((always_inline))

namespace models::fused_loops {
namespace {

MODELS_INLINE float wide(float x) { return x; }
MODELS_INLINE float wide(Half16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16); }
template <class T>
MODELS_INLINE T narrow(float x);
template <>
MODELS_INLINE float narrow<float>(float x) {
  return x;
}
template <>
MODELS_INLINE Half16 narrow<Half16>(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<Half16>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
template <class T>
MODELS_INLINE float rounded(float x) {
  return wide(narrow<T>(x));
}

// exp(x) to 2 units in the last place: 2^n times a polynomial (Cody and Waite's reduction; coefficients of Cephes).
MODELS_INLINE float exponential(float x) {
  x = std::min(std::max(x, -87.3f), 88.3f);
  const float magic = 12582912.0f;  // adding it rounds to an integer
  const float n = (x * 1.44269504088896341f + magic) - magic;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * std::bit_cast<float>((static_cast<std::int32_t>(n) + 127) << 23);
}

constexpr std::int64_t kLanes = 16;

template <class T>
MODELS_INLINE float dot(const T* a, const T* b, const float* weight, std::int64_t width) {
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (std::int64_t k = 0; k < kLanes; ++k)
      lanes[k] += wide(a[i + k]) * wide(b[i + k]) * (weight == nullptr ? 1.0f : weight[i + k]);
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  for (; i < width; ++i) sum += wide(a[i]) * wide(b[i]) * (weight == nullptr ? 1.0f : weight[i]);
  return sum;
}

template <class T>
MODELS_INLINE void norm_rows(const T* x, const float* weight, T* y, float* scales, std::int64_t rows,
                             std::int64_t width, float epsilon) {
  for (std::int64_t row = 0; row < rows; ++row, x += width, y += width) {
    const float scale = 1.0f / std::sqrt(dot<T>(x, x, nullptr, width) / static_cast<float>(width) + epsilon);
    scales[row] = scale;
    for (std::int64_t i = 0; i < width; ++i) y[i] = narrow<T>(weight[i] * rounded<T>(wide(x[i]) * scale));
  }
}

template <class T>
MODELS_INLINE void norm_rows_backward(const T* dy, const T* x, const float* weight, const float* scales, T* dx,
                                      float* dweight, std::int64_t rows, std::int64_t width) {
  for (std::int64_t row = 0; row < rows; ++row, x += width, dx += width, dy += width) {
    const float scale = scales[row];
    const float shared = dot<T>(dy, x, weight, width) * scale * scale * scale / static_cast<float>(width);
    for (std::int64_t i = 0; i < width; ++i) {
      const float slope = wide(dy[i]), value = wide(x[i]);
      dweight[i] += slope * rounded<T>(value * scale);
      dx[i] = narrow<T>(slope * weight[i] * scale - value * shared);
    }
  }
}

// One time step: all heads. sign: -1 turns backwards.
template <class T>
MODELS_INLINE void turn(const T* x, const T* cos, const T* sin, T* y, std::int64_t heads, std::int64_t width,
                        float sign) {
  const std::int64_t half = width / 2;
  for (std::int64_t head = 0; head < heads; ++head, x += width, y += width)
    for (std::int64_t i = 0; i < half; ++i) {
      const float a = wide(x[i]), b = wide(x[half + i]), c = wide(cos[i]), s = sign * wide(sin[i]);
      y[i] = narrow<T>(rounded<T>(a * c) + rounded<T>(-b * s));
      y[half + i] = narrow<T>(rounded<T>(b * c) + rounded<T>(a * s));
    }
}

template <class T>
MODELS_INLINE void gate_all(const T* gate, const T* up, T* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = wide(gate[i]);
    y[i] = narrow<T>(rounded<T>(g / (1.0f + exponential(-g))) * wide(up[i]));
  }
}

template <class T>
MODELS_INLINE void gate_all_backward(const T* dy, const T* gate, const T* up, T* dgate, T* dup, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = wide(gate[i]), slope = wide(dy[i]), share = 1.0f / (1.0f + exponential(-g));
    dup[i] = narrow<T>(slope * g * share);
    dgate[i] = narrow<T>(slope * wide(up[i]) * share * (1.0f + g * (1.0f - share)));
  }
}

}  // namespace

// What runs: a clone for each kind of processor, with the loops above in it.
#define MODELS_KERNELS(T)                                                                                            \
  MODELS_CLONES void norm(const T* x, const float* w, T* y, float* s, std::int64_t n, std::int64_t width, float e) { \
    norm_rows<T>(x, w, y, s, n, width, e);                                                                           \
  }                                                                                                                  \
  MODELS_CLONES void norm_backward(const T* dy, const T* x, const float* w, const float* s, T* dx, float* dw,        \
                                   std::int64_t n, std::int64_t width) {                                             \
    norm_rows_backward<T>(dy, x, w, s, dx, dw, n, width);                                                            \
  }                                                                                                                  \
  MODELS_CLONES void turned(const T* x, const T* c, const T* s, T* y, std::int64_t heads, std::int64_t width,        \
                            float sign) {                                                                            \
    turn<T>(x, c, s, y, heads, width, sign);                                                                         \
  }                                                                                                                  \
  MODELS_CLONES void gated(const T* g, const T* u, T* y, std::int64_t n) { gate_all<T>(g, u, y, n); }                \
  MODELS_CLONES void gated_backward(const T* dy, const T* g, const T* u, T* dg, T* du, std::int64_t n) {             \
    gate_all_backward<T>(dy, g, u, dg, du, n);                                                                       \
  }
MODELS_KERNELS(float)
MODELS_KERNELS(Half16)
#undef MODELS_KERNELS

}  // namespace models::fused_loops
