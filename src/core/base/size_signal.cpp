#include "base/size_signal.h"

#include <time.h>

#include <cerrno>

namespace zero::base {

SizeSignalOff::SizeSignalOff() {
  sigemptyset(&only_);
  sigaddset(&only_, SIGXFSZ);
  sigset_t pending;
  sigpending(&pending);
  was_pending_ = sigismember(&pending, SIGXFSZ) == 1;
  pthread_sigmask(SIG_BLOCK, &only_, &before_);
}

// Must preserve errno of the guarded call.
SizeSignalOff::~SizeSignalOff() {
  const int error = errno;
  const timespec now{};
  if (!was_pending_)
    while (sigtimedwait(&only_, nullptr, &now) < 0 && errno == EINTR) {
    }
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  errno = error;
}

}  // namespace zero::base
