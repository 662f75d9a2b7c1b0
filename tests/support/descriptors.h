// The open descriptors of this process, to show that nothing is left open.
#pragma once
#include <filesystem>
#include <iterator>

namespace zero::test {

inline std::ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

}  // namespace zero::test
