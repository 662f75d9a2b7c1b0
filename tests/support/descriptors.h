// Open descriptors of processes, to show that nothing is left open.
#pragma once
#include <sys/types.h>

#include <filesystem>
#include <iterator>
#include <set>
#include <string>

namespace zero::test {

inline std::ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

// The inodes of a process's sockets, as in /proc/net.
inline std::set<std::string> sockets_of(pid_t pid) {
  std::set<std::string> inodes;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd", error)) {
    const auto target = std::filesystem::read_symlink(entry.path(), error).string();
    if (target.rfind("socket:[", 0) == 0) inodes.insert(target.substr(8, target.size() - 9));
  }
  return inodes;
}

}  // namespace zero::test
