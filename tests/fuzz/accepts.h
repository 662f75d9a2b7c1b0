// What the targets of every file share. See targets.h.
#pragma once
#include <zero/errors.h>

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

}  // namespace zero::test
