// Selects the SIMD targets to compile, for every file with run-time dispatch: those with a fused multiply-add, and
// scalar code (with std::fma) for other machines. Include it before any Highway header; [Note: same bits] in
// kernels/elementwise.h depends on it.
#pragma once
#include <hwy/detect_compiler_arch.h>

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
// Highway's other fallback rounds the product of a multiply-add, and some compilers fail on it.
#define HWY_BROKEN_EMU128 1
// Compile all of them regardless of -march: tests compare them.
#define HWY_COMPILE_ALL_ATTAINABLE
