// Optimizer states in 8 bits, by blocks (Dettmers et al., arXiv:2110.02861): 256 elements share one fp32, the block's
// largest magnitude, and each has a code for its share of it. The 8 bits of a code are a sign and one of 128
// magnitudes, or one of 256 values that are not negative. As with the paper's dynamic maps, larger shares have more
// codes: see [Note: shares]. Code 0 is 0; a mean of squares becomes 0 only if it is 0, because the update divides by
// its root (Li et al., arXiv:2309.01507).
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

// [Note: shares] Code c has the step c + 1, as an fp32 number; its share is the number with four times the logarithm,
// if the logarithm is read from the bits: exponent and mantissa are one integer, which is multiplied by four. So 1, the
// last code's share, and the 4 powers of two below it have 32 codes each (16 with a sign), the next 4 half as many, and
// so on: a share of 0.001 is within 6 % (12 %). Neighbours up to 2^-24 (2^-20) are on one straight line, so the nearest
// step is the nearest share. Code 0 would have the share `zero`, which is subtracted from all: the last one is so much
// larger that it stays 1.
struct Shares {
  std::uint32_t offset, back;  // a share's bits are 4 * the step's + offset; these are the share's / 4 + back
  float zero;
  std::uint32_t magnitude, sign;  // of a code: the bits of each; the sign in bit 31
  std::uint32_t one, codes;       // 1, and the bits of 2^23, whose lowest are added to
};
// Not known to the compiler: GCC would move such integers from a general register for every vector, which takes as long
// as a shuffle.
extern const Shares kShares[2];
inline const Shares& shares_of(CodeMap map) { return kShares[static_cast<int>(map)]; }

// Shares by code; the Signed map has those of codes 128 to 255 negative.
const std::array<float, 256>& values_of(CodeMap map);

// To the nearest code; where a share is in the middle of two, as far as fp32 can tell, to either. The rest of a last
// block that is not whole becomes 0. A block with a maximum below 2^-96 becomes 0, one with an Inf or NaN all NaN. out:
// state_block_bytes(numel) bytes, 4-byte aligned.
void encode_blocks(void* out, CodeMap map, const float* in, std::int64_t numel);

// out[i] = share * maximum, rounded once.
void decode_blocks(float* out, CodeMap map, const void* in, std::int64_t numel);

}  // namespace zero::kernels
