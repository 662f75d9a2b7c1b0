// For tests that need a GPU: the reason why none is available, queried once, in the order that libtorch requires.
#pragma once
#include <gtest/gtest.h>

#include "gpu/plugin.h"

#define ZERO_NEEDS_GPU()                       \
  if (zero::cuda::door().interface == nullptr) \
  GTEST_SKIP() << "needs a GPU: got " << zero::cuda::door().reason << ". Hint: " << zero::cuda::door().hint
