#include "base/memory_file.h"

#include <sys/mman.h>

#include <cerrno>

#include "base/standard_streams.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif

namespace zero::base {

int open_memory_file(const char* name, unsigned flags) {
  int fd = ::memfd_create(name, flags | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = ::memfd_create(name, flags);  // a kernel before 6.3
  return off_standard(fd);
}

}  // namespace zero::base
