// The largest resident memory of this process since a moment.
#pragma once
#include <malloc.h>

#include <cstdint>
#include <fstream>
#include <string>

namespace zero::test {

// Bytes; 0: the kernel does not tell.
inline std::uint64_t peak_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::stoull(line.substr(6)) * 1024;
  return 0;
}

// The peak starts again from what is resident now; the allocator keeps no memory that could hide a growth.
inline std::uint64_t restart_peak() {
  ::malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << 5;
  return peak_bytes();
}

}  // namespace zero::test
