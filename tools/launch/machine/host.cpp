// Reads files under /proc, /sys and /dev. A missing file means "no limit" or "unknown".
#include "tools/launch/machine/host.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <tuple>

#include "base/check.h"
#include "base/system.h"

namespace zero::launch {
namespace {

// This process's cgroup folder and version: 2, or 1 for `controller`.
std::pair<std::string, int> cgroup_folder(std::string_view controller) {
  std::istringstream lines(base::read_file("/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (names.empty()) {
      for (const std::string root : {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"})
        if (access((root + "/cgroup.controllers").c_str(), R_OK) == 0)
          return {access((root + path).c_str(), R_OK) == 0 ? root + path : root, 2};
    } else if (("," + names + ",").find("," + std::string(controller) + ",") != std::string::npos) {
      const std::string root = "/sys/fs/cgroup/" + std::string(controller);
      if (access(root.c_str(), R_OK) == 0) return {access((root + path).c_str(), R_OK) == 0 ? root + path : root, 1};
    }
  }
  return {"", 0};
}

// The number after `key` in lines of "key value"; -1 if missing.
double value_of(const std::string& text, const std::string& key) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (line.size() > key.size() && line.compare(0, key.size(), key) == 0 &&
        (line[key.size()] == ' ' || line[key.size()] == ':'))
      return std::atof(line.c_str() + key.size() + 1);
  return -1;
}

double cpu_quota() {
  const auto [folder, version] = cgroup_folder("cpu");
  double quota = -1, period = -1;
  if (version == 2) {
    std::istringstream(base::read_file(folder + "/cpu.max")) >> quota >> period;  // "max 100000" leaves both unset
  } else if (version == 1) {
    quota = std::atof(base::read_file(folder + "/cpu.cfs_quota_us").c_str());
    period = std::atof(base::read_file(folder + "/cpu.cfs_period_us").c_str());
  }
  return quota > 0 && period > 0 ? quota / period : 0;
}

}  // namespace

std::vector<int> allowed_cores() {
  std::vector<int> cores;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int c = 0; c < CPU_SETSIZE; ++c)
      if (CPU_ISSET(c, &set)) cores.push_back(c);
  return cores;
}

int usable_cores() {
  const int cores = std::max<int>(1, static_cast<int>(allowed_cores().size()));
  const double quota = cpu_quota();
  return quota > 0 ? std::clamp(static_cast<int>(std::ceil(quota)), 1, cores) : cores;
}

std::vector<std::string> gpu_slots() {
  std::vector<std::string> slots;
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    std::istringstream list(visible);
    for (std::string entry; std::getline(list, entry, ',');) {
      entry.erase(0, entry.find_first_not_of(' '));
      entry.erase(entry.find_last_not_of(' ') + 1);
      if (entry.empty() || entry[0] == '-') break;  // as in CUDA, the list ends at the first invalid entry
      slots.push_back(entry);
    }
    return slots;
  }
  int count = 0;
  if (DIR* dev = opendir("/dev")) {
    while (const dirent* entry = readdir(dev)) {
      const std::string_view name(entry->d_name);
      if (name.substr(0, 6) == "nvidia" && name.size() > 6 &&
          name.find_first_not_of("0123456789", 6) == std::string_view::npos)
        ++count;
    }
    closedir(dev);
  }
  for (int i = 0; i < count; ++i) slots.push_back(std::to_string(i));
  return slots;
}

int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const bool ok = fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (!ok) throw IoError(base::join("[free_port] cannot find a free port on 127.0.0.1: ", std::strerror(error)));
  return ntohs(address.sin_port);
}

void check_port(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  const int on = 1;  // a port in TIME_WAIT counts as free
  const bool taken = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                     bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 &&
                     errno != EADDRNOTAVAIL;  // a network without loopback
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (taken)
    throw ConfigError(base::join("[--master-port] cannot open port ", port, ": ", std::strerror(error),
                                 ". Hint: without the option a free one is found."));
}

std::vector<int> parse_core_list(std::string_view text, std::string_view option) {
  std::vector<int> cores;
  std::size_t at = 0;
  const auto fail = [&] {
    throw ConfigError(base::join("[", option, ":1:", at + 1, "] got \"", text.substr(0, 80),
                                 "\", expected core numbers and ranges such as 1,3-5"));
  };
  const auto number = [&] {
    const std::size_t start = at;
    int value = 0;
    while (at < text.size() && text[at] >= '0' && text[at] <= '9' && value < CPU_SETSIZE)
      value = value * 10 + (text[at++] - '0');
    if (at == start || value >= CPU_SETSIZE) fail();
    return value;
  };
  while (true) {
    const int first = number();
    int last = first;
    if (at < text.size() && text[at] == '-') {
      ++at;
      if ((last = number()) < first) fail();
    }
    for (int c = first; c <= last; ++c) cores.push_back(c);
    if (at == text.size()) break;
    if (text[at] != ',') fail();
    ++at;
  }
  std::sort(cores.begin(), cores.end());
  cores.erase(std::unique(cores.begin(), cores.end()), cores.end());
  return cores;
}

std::vector<std::vector<int>> deal_cores(std::vector<int> cores, int ranks) {
  if (static_cast<int>(cores.size()) < ranks)
    throw ConfigError(
        base::join("[--bind-cores-to-rank] got ", cores.size(), " cores for ", ranks,
                   " ranks, expected at least one core a rank. Hint: start fewer ranks, or do not bind."));
  std::vector<std::tuple<int, int, int>> order;  // node, core of the package, cpu
  for (const int cpu : cores) {
    const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu);
    int node = 0;
    if (DIR* dir = opendir(folder.c_str())) {
      while (const dirent* entry = readdir(dir))
        if (std::strncmp(entry->d_name, "node", 4) == 0) node = std::atoi(entry->d_name + 4);
      closedir(dir);
    }
    const std::string core = base::read_file(folder + "/topology/core_id"),
                      package = base::read_file(folder + "/topology/physical_package_id");
    order.emplace_back(node, std::atoi(package.c_str()) * 65536 + (core.empty() ? cpu : std::atoi(core.c_str())), cpu);
  }
  std::sort(order.begin(), order.end());
  std::vector<std::vector<int>> dealt(static_cast<std::size_t>(ranks));
  for (std::size_t i = 0; i < order.size(); ++i)
    dealt[i * static_cast<std::size_t>(ranks) / order.size()].push_back(std::get<2>(order[i]));
  return dealt;
}

std::uint64_t oom_kill_count() {
  const auto [folder, version] = cgroup_folder("memory");
  if (version == 0) return 0;
  const double count =
      value_of(base::read_file(folder + (version == 2 ? "/memory.events" : "/memory.oom_control")), "oom_kill");
  return count > 0 ? static_cast<std::uint64_t>(count) : 0;
}

std::uint64_t memory_limit_bytes() {
  const auto [folder, version] = cgroup_folder("memory");
  double limit = 0;
  if (version == 2) limit = std::atof(base::read_file(folder + "/memory.max").c_str());
  if (version == 1) limit = std::atof(base::read_file(folder + "/memory.limit_in_bytes").c_str());
  return limit > 0 && limit < 1e18 ? static_cast<std::uint64_t>(limit) : 0;  // "max" reads as 0
}

std::uint64_t free_memory_bytes() {
  double left = value_of(base::read_file("/proc/meminfo"), "MemAvailable") * 1024;
  const auto [folder, version] = cgroup_folder("memory");
  const double used =
      std::atof(base::read_file(folder + (version == 2 ? "/memory.current" : "/memory.usage_in_bytes")).c_str());
  const std::uint64_t limit = memory_limit_bytes();
  if (limit > 0) left = std::min(left, static_cast<double>(limit) - used);
  return left > 0 ? static_cast<std::uint64_t>(left) : 0;
}

std::string random_hex(int bytes) {
  std::string out;
  for (int i = 0; i < bytes; ++i) {
    unsigned char byte = 0;
    while (getrandom(&byte, 1, 0) != 1)
      if (errno != EINTR) throw IoError(base::join("[random_hex] cannot draw random bytes: ", std::strerror(errno)));
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

std::string new_run_id() {
  const time_t now = time(nullptr);
  tm local{};
  localtime_r(&now, &local);
  char text[32];
  strftime(text, sizeof text, "%Y%m%d-%H%M%S-", &local);
  return text + random_hex(6);
}

}  // namespace zero::launch
