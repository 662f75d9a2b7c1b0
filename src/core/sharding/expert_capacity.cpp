// See expert_capacity.h.
#include "sharding/expert_capacity.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

namespace zero::sharding {
namespace {

// The shortest decimal that is `value`: digits * 10^exponent.
struct Decimal {
  explicit Decimal(double value) {
    char text[64];
    const auto end = std::to_chars(text, text + sizeof text, value, std::chars_format::scientific).ptr;
    bool fraction = false;
    const char* at = text;
    for (; at != end && *at != 'e'; ++at) {
      if (*at == '.') {
        fraction = true;
        continue;
      }
      digits = digits * 10 + (*at - '0');
      exponent -= fraction ? 1 : 0;
    }
    int power = 0;
    if (at != end) std::from_chars(at + (at[1] == '+' ? 2 : 1), end, power);
    exponent += power;
  }
  std::int64_t digits = 0;
  int exponent = 0;
};

}  // namespace

std::int64_t capacity(std::int64_t tokens, std::int64_t experts, double factor, std::int64_t k, std::int64_t minimum) {
  constexpr auto most = std::numeric_limits<std::int64_t>::max();
  const auto about = static_cast<long double>(tokens) * static_cast<long double>(k) * static_cast<long double>(factor) /
                     static_cast<long double>(experts);
  if (about > 1e15L) return most;
  const Decimal decimal(factor);
  // Below, tokens * k * digits / (experts * 10^-exponent) needs less than 127 bits.
  if (decimal.exponent < -30 || decimal.exponent > 15)
    return std::max(static_cast<std::int64_t>(std::ceil(about)), minimum);
  __int128 numerator = static_cast<__int128>(tokens) * k * decimal.digits, denominator = experts;
  for (int power = decimal.exponent; power > 0; --power) numerator *= 10;
  for (int power = decimal.exponent; power < 0; ++power) denominator *= 10;
  return std::max(static_cast<std::int64_t>((numerator + denominator - 1) / denominator), minimum);
}

}  // namespace zero::sharding
