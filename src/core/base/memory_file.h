// Creates an anonymous file in memory (memfd_create(2)). It is not executable, which the kernel requires if
// vm.memfd_noexec is 2.
#pragma once

namespace zero::base {

// A descriptor, or -1 with errno. `flags`: MFD_...
int open_memory_file(const char* name, unsigned flags);

}  // namespace zero::base
