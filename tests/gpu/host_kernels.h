// The plug-in's table, served by this CPU: the arithmetic of a GPU's threads in plain loops. For tests of what calls
// the table, and of the arithmetic itself, on machines without a GPU.
#pragma once
#include "kernels/cuda/interface.h"

namespace zero::test {

const cuda::Interface& host_kernels();
// Calls of `update` and of `sum_of_squares` so far: that a test went this way.
int host_kernel_calls();

}  // namespace zero::test
