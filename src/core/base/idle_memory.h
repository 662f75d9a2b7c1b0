// Returns freed memory that the C library caches to the kernel.
#pragma once

namespace zero::base {

// No effect if another allocator replaces malloc (a sanitizer's, jemalloc): glibc's arenas are then not initialized,
// and trimming them would crash.
void release_idle_memory();

}  // namespace zero::base
