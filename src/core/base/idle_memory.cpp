// Checks once, through the dynamic linker, which malloc the process uses.
#include "base/idle_memory.h"

#include <dlfcn.h>
#include <malloc.h>

namespace zero::base {
namespace {

bool glibc_serves_malloc() {
  void* used = dlsym(RTLD_DEFAULT, "malloc");
  void* trim = dlsym(RTLD_DEFAULT, "malloc_trim");
  Dl_info malloc_home{}, trim_home{};
  return used != nullptr && trim != nullptr && dladdr(used, &malloc_home) != 0 && dladdr(trim, &trim_home) != 0 &&
         malloc_home.dli_fbase == trim_home.dli_fbase;
}

}  // namespace

void release_idle_memory() {
  static const bool kCan = glibc_serves_malloc();
  if (kCan) malloc_trim(0);
}

}  // namespace zero::base
