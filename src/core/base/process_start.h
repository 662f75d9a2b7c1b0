// Tells whether a process that a file names is still the same one.
#pragma once
#include <sys/types.h>

#include <cstdint>

namespace zero::base {

// The start of the process in clock ticks since boot; 0 if there is none (or no /proc).
std::uint64_t process_start(pid_t pid);

}  // namespace zero::base
