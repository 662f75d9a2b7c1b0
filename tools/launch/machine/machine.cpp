// Each probe performs a small operation and undoes it. Numbers of /proc are used only if nothing can be tried.
#include "tools/launch/machine/machine.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>

#include "base/memory_file.h"
#include "base/system.h"
#include "tools/launch/machine/host.h"

namespace zero::launch {
namespace {

constexpr std::size_t kBlock = 1 << 20;

// The value of the first line "key : value" or "key: value" of a file.
std::string field(const std::string& file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    std::string name = line.substr(0, colon);
    name.erase(name.find_last_not_of(" \t") + 1);
    if (name != key) continue;
    const std::size_t start = line.find_first_not_of(" \t", colon + 1);
    return start == std::string::npos ? "" : line.substr(start);
  }
  return "";
}

std::uint64_t kib(const char* key) { return std::strtoull(field("/proc/meminfo", key).c_str(), nullptr, 10) * 1024; }

// 0 or the errno; a short count is EIO.
template <class Call>
int whole(std::size_t bytes, Call call) {
  ssize_t n;
  do n = call();
  while (n < 0 && errno == EINTR);
  return n < 0 ? errno : n == static_cast<ssize_t>(bytes) ? 0 : EIO;
}

}  // namespace

CpuFacts cpu_facts() {
  CpuFacts facts;
  facts.model = field("/proc/cpuinfo", "model name");
  // ARM's processors have numbers there: 0x41 and 0xd4f are a Neoverse V2, as in Grace.
  if (const auto part = field("/proc/cpuinfo", "CPU part"); facts.model.empty() && !part.empty())
    facts.model = "ARM processor, implementer " + field("/proc/cpuinfo", "CPU implementer") + ", part " + part;
  std::string flags = field("/proc/cpuinfo", "flags");
  if (flags.empty()) flags = field("/proc/cpuinfo", "Features");  // ARM
  std::istringstream words(flags);
  static constexpr const char* kAsked[] = {"avx2",        "fma",      "f16c",     "avx512f", "avx512_bf16",
                                           "avx512_vnni", "amx_tile", "amx_bf16", "asimd",   "asimdhp",
                                           "bf16",        "sve",      "sve2"};
  for (std::string word; words >> word;)
    if (std::find(std::begin(kAsked), std::end(kAsked), word) != std::end(kAsked)) facts.features.push_back(word);
  return facts;
}

MemoryFacts memory_facts() { return {kib("MemTotal"), kib("MemAvailable"), kib("SwapTotal"), memory_limit_bytes()}; }

int numa_nodes() {
  int nodes = 0;
  if (DIR* dir = opendir("/sys/devices/system/node")) {
    while (const dirent* entry = readdir(dir))
      nodes += std::strncmp(entry->d_name, "node", 4) == 0 && entry->d_name[4] >= '0' && entry->d_name[4] <= '9';
    closedir(dir);
  }
  return std::max(1, nodes);
}

SpaceFacts space_of(const std::filesystem::path& folder) {
  struct statvfs s {};
  if (statvfs(folder.c_str(), &s) != 0) return {0, 0, errno};
  return {static_cast<std::uint64_t>(s.f_blocks) * s.f_frsize, static_cast<std::uint64_t>(s.f_bavail) * s.f_frsize, 0};
}

int try_memfd() {
  const int fd = base::open_memory_file("zero-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return errno;
  int error = 0;
  void* memory = MAP_FAILED;
  if (ftruncate(fd, 4096) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0 ||
      (memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED)
    error = errno;
  if (memory != MAP_FAILED) munmap(memory, 4096);
  close(fd);
  return error;
}

int try_pidfd() {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0u));
  if (fd < 0) return errno;
  close(fd);
  return 0;
}

int try_io_uring() {
  struct {  // struct io_uring_params, passed as zeros
    unsigned words[30];
  } params{};
  const int fd = static_cast<int>(syscall(SYS_io_uring_setup, 4u, &params));
  if (fd < 0) return errno;
  close(fd);
  return 0;
}

int try_file_in(const std::filesystem::path& folder) {
  std::string name = (folder / "zero-doctor-XXXXXX").string();
  const int fd = mkostemp(name.data(), O_CLOEXEC);
  if (fd < 0) return errno;
  const int error = whole(1, [&] { return write(fd, "x", 1); });
  close(fd);
  unlink(name.c_str());
  return error;
}

int try_subreaper() {
  int before = 0;
  if (prctl(PR_GET_CHILD_SUBREAPER, &before) != 0 || prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) return errno;
  prctl(PR_SET_CHILD_SUBREAPER, before);
  return 0;
}

DirectIo try_direct_io(const std::filesystem::path& folder, std::size_t bytes) {
  DirectIo result;
  const auto failed = [&](const char* step, int error) {
    result.step = step;
    result.error = error;
    return result;
  };
  struct Fd {
    int fd = -1;
    ~Fd() {
      if (fd >= 0) close(fd);
    }
  } file;
  file.fd = open(folder.c_str(), O_TMPFILE | O_DIRECT | O_RDWR | O_CLOEXEC, 0600);
  result.unnamed = file.fd >= 0;
  if (file.fd < 0) {
    std::string name = (folder / "zero-doctor-XXXXXX").string();
    file.fd = mkostemp(name.data(), O_CLOEXEC);
    if (file.fd < 0) return failed("open", errno);
    unlink(name.c_str());
    if (fcntl(file.fd, F_SETFL, O_DIRECT) != 0) return failed("O_DIRECT", errno);
  }
  result.alignment = 4096;
#ifdef STATX_DIOALIGN
  struct statx info {};
  if (statx(file.fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN) &&
      info.stx_dio_offset_align > 0)
    result.alignment = std::max(info.stx_dio_offset_align, info.stx_dio_mem_align);
#endif
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(kBlock, kBlock), &std::free);
  if (!memory) return failed("memory", ENOMEM);
  std::memset(memory.get(), 0x5a, kBlock);
  if (const int error = posix_fallocate(file.fd, 0, static_cast<off_t>(bytes))) return failed("fallocate", error);
  double began = base::steady_seconds();
  for (std::size_t at = 0; at < bytes; at += kBlock)
    if (const int error = whole(kBlock, [&] { return pwrite(file.fd, memory.get(), kBlock, static_cast<off_t>(at)); }))
      return failed("write", error);
  result.write_bytes_per_s = static_cast<double>(bytes) / std::max(1e-9, base::steady_seconds() - began);
  began = base::steady_seconds();
  for (std::size_t at = 0; at < bytes; at += kBlock)
    if (const int error = whole(kBlock, [&] { return pread(file.fd, memory.get(), kBlock, static_cast<off_t>(at)); }))
      return failed("read", error);
  result.read_bytes_per_s = static_cast<double>(bytes) / std::max(1e-9, base::steady_seconds() - began);
  return result;
}

namespace {

// Runs in the child: one line per GPU, "bytes name", or "! reason".
std::string ask_libcuda() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return "! libcuda.so.1 is not found\n";
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
  const auto count_of = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDeviceGetCount"));
  const auto name_of = reinterpret_cast<int (*)(char*, int, int)>(dlsym(library, "cuDeviceGetName"));
  const auto bytes_of = reinterpret_cast<int (*)(std::size_t*, int)>(dlsym(library, "cuDeviceTotalMem_v2"));
  if (!init || !count_of || !name_of || !bytes_of) return "! libcuda.so.1 lacks a function\n";
  if (const int error = init(0)) return "! cuInit says " + std::to_string(error) + "\n";
  int count = 0;
  if (const int error = count_of(&count)) return "! cuDeviceGetCount says " + std::to_string(error) + "\n";
  std::string text;
  for (int i = 0; i < count; ++i) {
    char name[128] = {};
    std::size_t bytes = 0;
    name_of(name, sizeof name - 1, i);
    bytes_of(&bytes, i);
    text += std::to_string(bytes) + " " + name + "\n";
  }
  return text.empty() ? "! no device\n" : text;
}

}  // namespace

GpuFacts gpu_facts(double limit_s) {
  GpuFacts facts;
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  ..."
  std::istringstream version(field("/proc/driver/nvidia/version", "NVRM version"));
  for (std::string word; version >> word && facts.driver.empty();)
    if (word.find_first_not_of("0123456789.") == std::string::npos && word.find('.') != std::string::npos)
      facts.driver = word;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    facts.error = std::strerror(errno);
    return facts;
  }
  // A separate process, because a driver may crash or block.
  const pid_t pid = fork();
  if (pid == 0) {
    const std::string text = ask_libcuda();
    [[maybe_unused]] const ssize_t n = write(ends[1], text.data(), std::min<std::size_t>(text.size(), 4096));
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  const double end = base::steady_seconds() + limit_s;
  bool open = pid > 0;
  while (open && base::steady_seconds() < end) {
    pollfd ready{ends[0], POLLIN, 0};
    if (poll(&ready, 1, 50) <= 0) continue;
    char bytes[4096];
    const ssize_t n = read(ends[0], bytes, sizeof bytes);
    if (n > 0) text.append(bytes, static_cast<std::size_t>(n));
    open = n > 0 || (n < 0 && errno == EINTR);
  }
  close(ends[0]);
  if (pid > 0) {
    kill(pid, SIGKILL);
    // A child that hangs in the driver is left to init.
    for (int tries = 0; tries < 200 && waitpid(pid, nullptr, WNOHANG) == 0; ++tries) poll(nullptr, 0, 5);
  }
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t space = line.find(' ');
    if (line[0] == '!' || space == std::string::npos) {
      facts.error = line.substr(std::min<std::size_t>(2, line.size()));
    } else {
      facts.bytes.push_back(std::strtoull(line.c_str(), nullptr, 10));
      facts.names.push_back(line.substr(space + 1));
    }
  }
  if (text.empty()) facts.error = open ? "the driver does not answer" : "the driver's library crashed";
  return facts;
}

}  // namespace zero::launch
