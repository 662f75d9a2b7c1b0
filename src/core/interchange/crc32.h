// CRC-32 of zip files (ISO 3309). Detects corruption, not tampering.
#pragma once
#include <cstddef>
#include <cstdint>

namespace zero::interchange {

// Of `before`'s bytes followed by these; 0 before the first.
std::uint32_t crc32(std::uint32_t before, const void* data, std::size_t bytes);

}  // namespace zero::interchange
