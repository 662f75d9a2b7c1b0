// How much the last-level caches of this machine hold: from there on results are better streamed to memory
// (kernels/elementwise.h, Stores). Nothing else of the machine's shape is here.
#pragma once
#include <cstddef>
#include <string>

namespace zero::kernels {

// Bytes of all last-level caches together, as the kernel tells; 32 MiB where it does not. Read once.
std::size_t last_level_cache_bytes();

// The same from a folder like /sys/devices/system/cpu, read anew; 0 where nothing is found.
std::size_t last_level_cache_bytes(const std::string& folder);

}  // namespace zero::kernels
