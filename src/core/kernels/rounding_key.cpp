// The keys and constants of stochastic rounding.
#include "kernels/cuda/random_bits.h"
#include "kernels/rounding_words.h"
#include "kernels/update_simd.h"

namespace zero::kernels {

const RoundingWords kRoundingWords{cuda::kMix1, cuda::kMix2, cuda::kThirdDraw, cuda::kFourthDraw, 0xffffu,
                                   0x400000u,   1,           0x7fffu};

namespace {

// The finalizer of MurmurHash3 (A. Appleby, public domain).
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
  return x ^ x >> 33;
}

}  // namespace

std::uint64_t rounding_key(std::uint64_t seed, std::int64_t update, std::uint64_t parameter) {
  const auto key = mixed(mixed(mixed(seed) ^ static_cast<std::uint64_t>(update)) ^ parameter);
  return key == 0 ? 1 : key;
}

}  // namespace zero::kernels
