// Optimizer states in 8 bits, by blocks (Dettmers et al., arXiv:2110.02861): 256 elements share one fp32, the block's
// largest magnitude, and each has a code for its share of it. The 8 bits of a code are a sign and one of 128
// magnitudes, or one of 256 values that are not negative: dynamic maps of seven decades, as in the paper, but with 1 in
// place of the signed map's largest value and its negative, so that a decoded block encodes to itself. Code 0 is 0; a
// mean of squares becomes 0 only if it is 0, because the update divides by its root (Li et al., arXiv:2309.01507).
//
// No torch, no communication. Results do not depend on the SIMD target, or on a division at whole blocks.
#pragma once
#include <array>
#include <cstdint>

namespace zero::kernels {

inline constexpr std::int64_t kStateBlock = 256;
// The maximum, then the codes.
inline constexpr std::int64_t kStateBlockBytes = 4 + kStateBlock;
// A last block that is not whole has the size of a whole one.
constexpr std::int64_t state_block_bytes(std::int64_t numel) {
  return (numel + kStateBlock - 1) / kStateBlock * kStateBlockBytes;
}

enum class CodeMap { Signed, Unsigned };
// Of state `slot` of an update rule: after the first, means of squares.
constexpr CodeMap state_map(int slot) { return slot == 0 ? CodeMap::Signed : CodeMap::Unsigned; }

// Shares by code; the Signed map has those of codes 128 to 255 negative.
const std::array<float, 256>& values_of(CodeMap map);

// To the nearest code, of two equally near ones to the even one. The rest of a last block that is not whole becomes 0.
// A block with a maximum below 2^-96 becomes 0, one with an Inf or NaN all NaN. out: state_block_bytes(numel) bytes,
// 4-byte aligned.
void encode_blocks(void* out, CodeMap map, const float* in, std::int64_t numel);

// out[i] = share * maximum.
void decode_blocks(float* out, CodeMap map, const void* in, std::int64_t numel);

}  // namespace zero::kernels
