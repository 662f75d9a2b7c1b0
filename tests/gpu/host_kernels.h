// The plug-in's function table, implemented on the CPU: the arithmetic of GPU threads in plain loops. For tests of code
// that calls the table, and of the arithmetic, without a GPU.
#pragma once
#include "kernels/cuda/interface.h"

namespace zero::test {

const cuda::Interface& host_kernels();
// Calls so far: that a test went this way.
struct HostKernelCalls {
  int sums = 0, updates = 0;
};
HostKernelCalls host_kernel_calls();

}  // namespace zero::test
