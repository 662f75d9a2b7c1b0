// CRC-32 as zip files and zlib compute it (reflected polynomial 0xedb88320).
#pragma once
#include <cstddef>
#include <cstdint>

namespace zero::interchange {

// Continues `crc`, 0 at the beginning.
std::uint32_t crc32(std::uint32_t crc, const void* data, std::size_t bytes);
// Of a range and the `bytes` that follow it, from the values of both.
std::uint32_t crc32_joined(std::uint32_t first, std::uint32_t second, std::uint64_t bytes);

}  // namespace zero::interchange
