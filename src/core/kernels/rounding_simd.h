// Interface between update_range.cpp and rounding_simd.cpp (compiled once per SIMD target): 16-bit values as fp32 and
// back, also with stochastic rounding by the bits of cuda/random_bits.h. In the calling thread.
#pragma once
#include <cstdint>

#include "kernels/elementwise.h"

namespace zero::kernels {

// out[i] = random_bits(key, first_element + i).
void draw_bits(std::uint32_t* out, std::uint64_t key, std::int64_t first_element, std::int64_t numel);

// out[i] = in[i]. dtype: BF16 or F16. convert() of elementwise.h without its checks and threads.
void widen(float* out, const void* in, Dtype dtype, std::int64_t numel);
// The same to the nearest, of two equally near ones the even one.
void round_to_nearest(void* out, Dtype dtype, const float* in, std::int64_t numel);

// out[i] = in[i], rounded to dtype by draw_of(bits[i], value). dtype: BF16 or F16.
void round_stochastically(void* out, Dtype dtype, const float* in, const std::uint32_t* bits, int value,
                          std::int64_t numel);

}  // namespace zero::kernels
