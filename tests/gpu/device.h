// For tests that need a GPU: the reason why none is available, queried once, in the order that libtorch requires.
#pragma once
#include <gtest/gtest.h>

#include "gpu/plugin.h"

#define ZERO_NEEDS_GPU()                         \
  if (zero::cuda::plugin().interface == nullptr) \
  GTEST_SKIP() << "needs a GPU: got " << zero::cuda::plugin().reason << ". Hint: " << zero::cuda::plugin().hint
