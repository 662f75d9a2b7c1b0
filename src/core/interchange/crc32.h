// CRC-32 as zip files have it, from zlib.
#pragma once
#include <zlib.h>

#include <cstddef>
#include <cstdint>

namespace zero::interchange {

// Continues `crc`, 0 at the beginning.
inline std::uint32_t crc32(std::uint32_t crc, const void* data, std::size_t bytes) {
  if (bytes == 0) return crc;  // zlib takes a null pointer for a question
  return static_cast<std::uint32_t>(::crc32_z(crc, static_cast<const Bytef*>(data), bytes));
}

// Of a range and the `bytes` that follow it, from the values of both.
inline std::uint32_t crc32_joined(std::uint32_t first, std::uint32_t second, std::uint64_t bytes) {
  static_assert(sizeof(z_off_t) == 8, "files have more than 2 GiB");
  return static_cast<std::uint32_t>(::crc32_combine(first, second, static_cast<z_off_t>(bytes)));
}

}  // namespace zero::interchange
