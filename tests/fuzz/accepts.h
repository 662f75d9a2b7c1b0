// What the targets of every file share. See targets.h.
#pragma once
#include <zero/errors.h>

#include <cstdio>
#include <cstdlib>

namespace zero::test {

// Runs a parser whose errors are of these classes. Returns whether it accepted.
template <class Run>
bool accepts(const Run& run) {
  try {
    run();
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Ends the process with `what`: a fuzzer and a test see that as a failure.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

}  // namespace zero::test
