// The loops over memory of fused.h's functions, in fp32 and bf16, without torch. Only fused_passes.cpp calls them.
#pragma once
#include <cstdint>

namespace models::fused_loops {

// bf16 as its bits.
using Half16 = std::uint16_t;

// x, y: n rows of `width` elements; w: a weight [width]; s: a scale of each row, written by norm(). norm_backward()
// adds to dw. turned(): one time step of all heads; a sign of -1 turns backwards. gated(): n elements.
#define MODELS_LOOPS(T)                                                                                          \
  void norm(const T* x, const float* w, T* y, float* s, std::int64_t n, std::int64_t width, float epsilon);      \
  void norm_backward(const T* dy, const T* x, const float* w, const float* s, T* dx, float* dw, std::int64_t n,  \
                     std::int64_t width);                                                                        \
  void turned(const T* x, const T* cos, const T* sin, T* y, std::int64_t heads, std::int64_t width, float sign); \
  void gated(const T* gate, const T* up, T* y, std::int64_t n);                                                  \
  void gated_backward(const T* dy, const T* gate, const T* up, T* dgate, T* dup, std::int64_t n);
MODELS_LOOPS(float)
MODELS_LOOPS(Half16)
#undef MODELS_LOOPS

}  // namespace models::fused_loops
