// Formats bytes as lower-case hexadecimal digits, as digests are shown and stored.
#pragma once
#include <cstddef>
#include <string>

namespace zero::base {

inline std::string hex(const unsigned char* bytes, std::size_t count) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 0; i < count; ++i) {
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

}  // namespace zero::base
