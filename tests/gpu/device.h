// For tests that need a GPU: the reason why none is available, queried once, in the order that libtorch requires. The
// program gpu_simulated has one in software.
#pragma once
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "gpu/plugin.h"
#include "net/transport_choice.h"

namespace zero::test {

// Set if the GPU is the simulated one: the accesses, since the last call, whose order was left to chance.
inline std::function<std::vector<std::string>()> simulated_faults;

// Queried in a child process, because a process that has initialised the driver may not fork and use it.
inline int gpus_in_child() {
  if (simulated_faults) return 1;
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
