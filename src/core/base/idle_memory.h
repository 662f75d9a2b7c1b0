// Freed memory that the C library keeps for later: giving it back to the kernel.
#pragma once

namespace zero::base {

// Does nothing when another allocator stands in malloc's place (a sanitizer's, jemalloc): glibc's own
// arenas were never set up then, and trimming them would crash.
void release_idle_memory();

}  // namespace zero::base
