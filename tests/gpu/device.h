// For tests that need a GPU: the reason why none is available, queried once, in the order that libtorch requires.
#pragma once
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "gpu/plugin.h"
#include "net/transport_choice.h"

namespace zero::test {

// Queried in a child process, because a process that has initialised the driver may not fork and use it.
inline int gpus_in_child() {
  const pid_t pid = fork();
  if (pid == 0) _exit(std::min(net::visible_gpus(), 100));
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

}  // namespace zero::test

#define ZERO_NEEDS_GPU()                         \
  if (zero::cuda::plugin().interface == nullptr) \
  GTEST_SKIP() << "needs a GPU: got " << zero::cuda::plugin().reason << ". Hint: " << zero::cuda::plugin().hint
