// The entry point of libFuzzer: one program for all targets, of which ZERO_FUZZ_TARGET names one. script/fuzz builds
// and runs it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fuzz/targets.h"

namespace {

const zero::test::FuzzTarget& chosen() {
  static const auto target = [] {
    const char* name = std::getenv("ZERO_FUZZ_TARGET");
    for (const auto& one : zero::test::fuzz_targets())
      if (name != nullptr && std::strcmp(name, one.name) == 0) return one;
    std::fprintf(stderr, "fuzz: ZERO_FUZZ_TARGET names no target\n");
    std::exit(2);
  }();
  return target;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  chosen().run({reinterpret_cast<const char*>(data), size});
  return 0;
}
