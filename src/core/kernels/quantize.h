// Blockwise integers for slow links, as in ZeRO++ (Wang et al., arXiv:2306.10209): 256 elements share one fp32 scale,
// the block's largest magnitude divided by 127 (8 bits) or 7 (4 bits). Lossy: the error of an element is at most half a
// scale, and an element is 0 if the scale would be below 2^-126. Results do not depend on threads or on a division at
// whole blocks. No torch, no communication.
#pragma once
#include <cstdint>

#include "kernels/elementwise.h"

namespace zero::kernels {

constexpr std::int64_t kQuantizedBlock = 256;

// Bytes of `numel` elements: one scale per block, including a partial one, then the integers; a multiple of 4.
constexpr std::int64_t quantized_bytes(std::int64_t numel, int bits) {
  return 4 * ((numel + kQuantizedBlock - 1) / kQuantizedBlock) + ((numel * bits + 7) / 8 + 3) / 4 * 4;
}

// bits: 8 or 4. out: quantized_bytes(numel, bits) bytes, 4-byte aligned. A block with an Inf or NaN becomes all NaN.
void quantize(void* out, int bits, const void* in, Dtype in_dtype, std::int64_t numel);

// out[i] = round(integer * scale).
void dequantize(void* out, Dtype out_dtype, const void* in, int bits, std::int64_t numel);

// sum[i] += integer * scale, in fp32.
void add_dequantized(float* sum, const void* in, int bits, std::int64_t numel);

}  // namespace zero::kernels
