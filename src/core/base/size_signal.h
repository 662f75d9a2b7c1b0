// Past the limit of file sizes (ulimit -f) the kernel raises SIGXFSZ, whose default is death, beside the error EFBIG
// that the caller wants to tell. No handler: the signals of a program are its own.
#pragma once
#include <signal.h>

namespace zero::base {

// While it lives this thread gets the error alone. Costs four system calls.
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
