// The shared memory of this process, as the kernel counts it.
#pragma once
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>

namespace zero::test {

// This process's part of the shared-memory pages that it has mapped; bytes.
inline long long shared_pages_bytes() {
  std::ifstream in("/proc/self/smaps_rollup");
  for (std::string line; std::getline(in, line);)
    if (line.rfind("Pss_Shmem:", 0) == 0) return std::stoll(line.substr(10)) * 1024;
  throw std::runtime_error("/proc/self/smaps_rollup has no Pss_Shmem");
}

}  // namespace zero::test
