// 8-bit states one value at a time, as [Note: shares] in kernels/blocks8.h defines them: the reference of the vectors'
// bits. It uses none of their code.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace zero::test {

class Blocks8Reference {
 public:
  explicit Blocks8Reference(bool has_sign)
      : has_sign_(has_sign), first_(word(1.0f) - 4 * (word(has_sign ? 128.0f : 256.0f) - word(1.0f))) {}

  // Of a finite value in a block with this maximum, at least 2^-96.
  int code(float value, float maximum) const {
    const float size = std::fabs(value), share = std::fma(size, 1 / maximum, zero());
    const float step = number(word(1.0f) + ((word(share) - first_) >> 2));
    const int magnitude = static_cast<int>(std::nearbyint(static_cast<double>(step) - 1));
    if (has_sign_) return magnitude | (std::signbit(value) ? 128 : 0);
    return magnitude == 0 && size != 0 ? 1 : magnitude;
  }
  float value(int code, float maximum) const {
    const int magnitude = has_sign_ ? code % 128 : code;
    const float share = number(first_ + 4 * (word(static_cast<float>(magnitude + 1)) - word(1.0f)));
    const float size = std::fma(share, maximum, -zero() * maximum);
    return has_sign_ && code >= 128 ? -size : size;
  }

 private:
  static std::uint32_t word(float of) { return std::bit_cast<std::uint32_t>(of); }
  static float number(std::uint32_t bits) { return std::bit_cast<float>(bits); }
  float zero() const { return number(first_); }  // what code 0 would have

  bool has_sign_;
  std::uint32_t first_;  // bits of code 0's share; those of the last code are those of 1
};

}  // namespace zero::test
