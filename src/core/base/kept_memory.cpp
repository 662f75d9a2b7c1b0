// See kept_memory.h.
#include "base/kept_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "base/memory_file.h"
#include "base/size_signal.h"
#include "base/system.h"

namespace zero::base {
namespace {

constexpr auto kBytes = static_cast<off_t>(kKeptSlots * kKeptSlotBytes);
// Nobody can give the descriptor another size, by which it is recognised.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

KeptMemory find() {
  const auto fd = number_in_env("ZERO_KEEP_FD", 1 << 20), attempt = number_in_env("ZERO_RESTART_COUNT", 1 << 30);
  const char* const run = std::getenv("ZERO_RUN_ID");
  if (fd < 0 || attempt < 0 || run == nullptr) return {};
  struct stat info {};
  const int seals = fcntl(static_cast<int>(fd), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(static_cast<int>(fd), &info) != 0 || info.st_size != kBytes)
    return {};
  std::string name = run;
  // The launcher adds it from the first restart on.
  const auto suffix = ".r" + std::to_string(attempt);
  if (attempt > 0 && name.ends_with(suffix)) name.resize(name.size() - suffix.size());
  return {static_cast<int>(fd), name, attempt};
}

}  // namespace

int make_kept_memory() {
  const int fd = open_memory_file("zero-kept", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return -1;
  const SizeSignalOff guard;
  if (ftruncate(fd, kBytes) == 0 && fcntl(fd, F_ADD_SEALS, kSeals) == 0) return fd;
  const int error = errno;
  ::close(fd);
  errno = error;
  return -1;
}

const KeptMemory& kept_memory() {
  static const KeptMemory memory = find();
  return memory;
}

}  // namespace zero::base
