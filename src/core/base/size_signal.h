// Beyond the limit of file sizes (ulimit -f) the kernel raises SIGXFSZ, which ends the process by default, in addition
// to returning EFBIG. A library must not install signal handlers, so the signal is blocked and discarded.
#pragma once
#include <signal.h>

namespace zero::base {

// RAII guard: this thread only gets the error. Costs four system calls.
class SizeSignalOff {
 public:
  SizeSignalOff();
  ~SizeSignalOff();
  SizeSignalOff(const SizeSignalOff&) = delete;
  SizeSignalOff& operator=(const SizeSignalOff&) = delete;

 private:
  sigset_t only_, before_;
  bool was_pending_;
};

}  // namespace zero::base
