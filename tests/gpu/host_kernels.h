// The plug-in's function table, implemented on the CPU: the arithmetic of GPU threads in plain loops. For tests of code
// that calls the table, and of the arithmetic, without a GPU.
#pragma once
#include "kernels/cuda/interface.h"

namespace zero::test {

const cuda::Interface& host_kernels();
// Calls of `update` and of `sum_of_squares` so far: that a test went this way.
int host_kernel_calls();

}  // namespace zero::test
