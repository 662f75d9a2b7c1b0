// The size of this machine's last-level caches. For larger data, results are streamed to memory (kernels/elementwise.h,
// Stores).
#pragma once
#include <cstddef>
#include <string>

namespace zero::kernels {

// Bytes of all last-level caches, as the kernel reports; 32 MiB if unknown. Read once.
std::size_t last_level_cache_bytes();

// The same, read from a folder like /sys/devices/system/cpu; 0 if it contains no cache.
std::size_t last_level_cache_bytes(const std::string& folder);

}  // namespace zero::kernels
