// Numbers in the byte order of zip files and pickles.
#pragma once
#include <cstdint>
#include <string>

namespace zero::interchange {

// Appends the lowest `bytes` bytes of a number, the lowest first.
inline void append_little(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 255);
}

}  // namespace zero::interchange
