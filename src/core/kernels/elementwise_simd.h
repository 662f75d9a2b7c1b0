// Interface between elementwise.cpp (checks, threads) and elementwise_simd.cpp (compiled once per SIMD target):
// single-threaded kernels on one range, dispatched to this CPU's best target. Pointers are to the first element of the
// range. Included by elementwise.cpp only.
#pragma once
#include "kernels/elementwise.h"

namespace zero::kernels::simd {

// Elements per piece of sum_of_squares, and interleaved sums.
inline constexpr std::int64_t kSquarePiece = 65536;
inline constexpr int kSquareLanes = 32;

// Operates on parts[p] + offset elements; `out` likewise. Streaming ends with a fence.
void sum_parts(void* out, Dtype out_dtype, const void* const* parts, int num_parts, Dtype in_dtype, std::int64_t offset,
               std::int64_t numel, Stores stores);
// memcpy with streaming stores; ends with a fence.
void copy_streaming(void* to, const void* from, std::int64_t bytes);
void accumulate(void* acc, Dtype acc_dtype, const void* in, Dtype in_dtype, std::int64_t numel);
void scale(void* data, Dtype dtype, float factor, std::int64_t numel);
// Adds the square of element i to sums[i % kSquareLanes]; the caller zeroes the sums.
void sum_of_squares(const void* in, Dtype in_dtype, std::int64_t numel, double* sums);

std::int64_t supported_targets();
std::int64_t chosen_target();

}  // namespace zero::kernels::simd
