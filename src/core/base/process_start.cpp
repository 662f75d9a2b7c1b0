#include "base/process_start.h"

#include <cstdlib>
#include <fstream>
#include <string>

#include "base/check.h"

namespace zero::base {

std::uint64_t process_start(pid_t pid) {
  std::ifstream in(join("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(in, line)) return 0;
  // The second field is the program's name in parentheses and may contain anything; field 22 follows the last one.
  const auto close = line.rfind(')');
  if (close == std::string::npos) return 0;
  std::size_t at = close + 1;
  for (int field = 3; field < 22; ++field) {
    at = line.find(' ', at + 1);
    if (at == std::string::npos) return 0;
  }
  return std::strtoull(line.c_str() + at + 1, nullptr, 10);
}

}  // namespace zero::base
