// Blockwise integers for slow links, as in ZeRO++ (Wang et al., arXiv:2306.10209): 256 elements share one fp32 scale,
// the block's largest magnitude over 127 (8 bits) or 7 (4 bits). Lossy: an element is off by at most half a scale, and
// is 0 where the scale would be below 2^-126. The bits of the result depend neither on threads nor on the cut at whole
// blocks. No torch and no communication here.
#pragma once
#include <cstdint>

#include "kernels/elementwise.h"

namespace zero::kernels {

constexpr std::int64_t kQuantizedBlock = 256;

// Bytes of `numel` elements: a scale for every begun block, then the integers; a multiple of 4.
constexpr std::int64_t quantized_bytes(std::int64_t numel, int bits) {
  return 4 * ((numel + kQuantizedBlock - 1) / kQuantizedBlock) + ((numel * bits + 7) / 8 + 3) / 4 * 4;
}

// bits: 8 or 4. out: quantized_bytes(numel, bits), 4-byte aligned. A block that holds an Inf or a NaN becomes all NaN.
void quantize(void* out, int bits, const void* in, Dtype in_dtype, std::int64_t numel);

// out[i] = round(integer * scale).
void dequantize(void* out, Dtype out_dtype, const void* in, int bits, std::int64_t numel);

// sum[i] += integer * scale, in fp32.
void add_dequantized(float* sum, const void* in, int bits, std::int64_t numel);

}  // namespace zero::kernels
