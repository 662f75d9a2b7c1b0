// Reads /proc. A process that ends while it is read is not an error.
#include "tools/launch/local/process_tree.h"
#include "base/system.h"

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>

namespace zero::launch {
namespace {

struct Stat {
  char state = '?';
  pid_t parent = -1;
};
Stat read_stat(pid_t pid) {
  // "pid (name) S ppid ...": the name may contain spaces and parentheses, so parse from the last one.
  const std::string text = base::read_file("/proc/" + std::to_string(pid) + "/stat");
  const std::size_t end = text.rfind(')');
  if (end == std::string::npos || end + 4 > text.size()) return {};
  return {text[end + 2], static_cast<pid_t>(std::atoi(text.c_str() + end + 4))};
}

template <class Body>
void each_process(Body body) {
  DIR* proc = opendir("/proc");
  if (!proc) return;
  while (const dirent* entry = readdir(proc)) {
    const pid_t pid = static_cast<pid_t>(std::atoi(entry->d_name));
    if (pid > 0) body(pid);
  }
  closedir(proc);
}

}  // namespace

std::vector<pid_t> children_of_self() {
  std::vector<pid_t> found;
  const std::string list = "/proc/self/task/" + std::to_string(getpid()) + "/children";
  if (access(list.c_str(), R_OK) == 0) {  // not in every kernel
    std::ifstream in(list);
    for (pid_t pid; in >> pid;) found.push_back(pid);
    return found;
  }
  const pid_t self = getpid();
  each_process([&](pid_t pid) {
    if (read_stat(pid).parent == self) found.push_back(pid);
  });
  return found;
}

bool has_environment(pid_t pid, const std::vector<std::string>& entries) {
  const std::string text = std::string(1, '\0') + base::read_file("/proc/" + std::to_string(pid) + "/environ") + '\0';
  const bool all = std::all_of(entries.begin(), entries.end(),
                               [&](const std::string& e) { return text.find('\0' + e + '\0') != std::string::npos; });
  return all && read_stat(pid).state != 'Z';
}

std::vector<pid_t> processes_with_environment(const std::vector<std::string>& entries) {
  std::vector<pid_t> found;
  each_process([&](pid_t pid) {
    if (has_environment(pid, entries)) found.push_back(pid);
  });
  return found;
}

char process_state(pid_t pid) { return read_stat(pid).state; }

}  // namespace zero::launch
