// Integers of kernels/rounding-inl.h in memory. A compiler that knew them would move them from a general register for
// every vector (GCC 12 does), which takes as long as a shuffle.
#pragma once
#include <cstdint>

namespace zero::kernels {

struct RoundingWords {
  std::uint32_t mix1, mix2, third, fourth;  // of cuda/random_bits.h
  std::uint32_t half, quiet;                // the lower 16 bits; what makes a NaN quiet
  std::uint32_t one, below_half;            // of rounding to the nearest
};
extern const RoundingWords kRoundingWords;

}  // namespace zero::kernels
