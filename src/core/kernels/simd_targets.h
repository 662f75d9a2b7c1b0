// Which SIMD targets are compiled, for every file with run-time dispatch: those with a real fused
// multiply-add, and scalar code (with std::fma) for all other machines. Include it before any
// header of Highway; [Note: same bits] in kernels/elementwise.h depends on it.
#pragma once
#include <hwy/detect_compiler_arch.h>

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
// Highway's other fall-back rounds products of a multiply-add and breaks some compilers.
#define HWY_BROKEN_EMU128 1
// All of them whatever -march says: the tests compare them.
#define HWY_COMPILE_ALL_ATTAINABLE
