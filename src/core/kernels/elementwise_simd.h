// The seam between kernels.cpp (checks, threads) and kernels_simd.cpp (one compilation per SIMD
// target): single-threaded kernels on one range, dispatched to the best target of this CPU.
// Pointers are to the range's first element. Nothing but kernels.cpp includes this.
#pragma once
#include "kernels/elementwise.h"

namespace zero::kernels::simd {

// Elements a piece of sum_of_squares has, and its interleaved sums.
inline constexpr std::int64_t kSquarePiece = 65536;
inline constexpr int kSquareLanes = 32;

// parts[p] + offset elements; out likewise. Streaming ends with a fence.
void sum_parts(void* out, Dtype out_dtype, const void* const* parts, int num_parts, Dtype in_dtype, std::int64_t offset,
               std::int64_t numel, Stores stores);
// memcpy with stores past the caches; ends with a fence.
void copy_streaming(void* to, const void* from, std::int64_t bytes);
void accumulate(void* acc, Dtype acc_dtype, const void* in, Dtype in_dtype, std::int64_t numel);
void scale(void* data, Dtype dtype, float factor, std::int64_t numel);
// Adds the squares of element i to sums[i % kSquareLanes], which the caller sets to 0.
void sum_of_squares(const void* in, Dtype in_dtype, std::int64_t numel, double* sums);

std::int64_t supported_targets();
std::int64_t chosen_target();

}  // namespace zero::kernels::simd
