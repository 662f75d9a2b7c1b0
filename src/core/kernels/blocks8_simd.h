// Interface between blocks8.cpp (tables) and blocks8_simd.cpp (compiled once per SIMD target).
#pragma once
#include <array>
#include <cstdint>

#include "kernels/blocks8.h"

namespace zero::kernels {

// A table from the upper 16 bits of a share to its code. Within such a bin the code changes once at most, so an entry
// has the code of the bin's first value, in bits 24 to 31, and from which lower 16 bits on it is one more, in bits 0
// to 16.
struct CodeTable {
  static constexpr std::uint32_t kFirstBits = 0x34000000u;  // of 2^-23: smaller shares have code 0
  static constexpr std::size_t kBins = ((0x3f800000u - kFirstBits) >> 16) + 1;
  std::array<std::uint32_t, kBins> entries;
  std::array<float, 256> values;
};
const CodeTable& table_of(CodeMap map);

namespace simd {
void encode_blocks(void* out, const CodeTable& table, bool has_sign, const float* in, std::int64_t numel);
void decode_blocks(float* out, const CodeTable& table, const void* in, std::int64_t numel);
}  // namespace simd

}  // namespace zero::kernels
