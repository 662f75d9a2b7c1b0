// A bijection that spreads every bit of a number over all bits: for keys and random numbers that are functions of a
// position. Independent of libzero, torch and models.
#pragma once
#include <cstdint>

namespace data {

// The step of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): mix(s),
// mix(s + kMixStep), mix(s + 2 * kMixStep), ... is its sequence.
inline constexpr std::uint64_t kMixStep = 0x9e3779b97f4a7c15u;

inline std::uint64_t mix(std::uint64_t x) {
  x += kMixStep;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace data
