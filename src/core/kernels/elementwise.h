// Element-wise arithmetic on flat memory: sums of gradients, conversions, the square sum of the
// global norm. SIMD is chosen at run time (AVX-512, AVX2, else scalar), large calls use OpenMP.
//
// [Note: same bits] Every element-wise function gives the same bits on every SIMD target, for any
// number of threads and for any cut of a range into sub-ranges (NaN stays NaN; its payload is not
// fixed). 16-bit values are read exactly and written with one round-to-nearest-even from fp32.
// No torch, no parameters, no communication here: raw pointers that need no alignment beyond
// their element's. A count below zero or a null pointer for a non-empty range is an InternalError.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace zero::kernels {

enum class Dtype { F32, BF16, F16 };

// How a result is written. Streaming: past the caches, which spares reading what is overwritten; for results that would
// have left the caches anyway before anybody reads them. The bits are the same.
enum class Stores { Cached, Streaming };

// Bytes of one element.
constexpr std::size_t size_of(Dtype dtype) { return dtype == Dtype::F32 ? 4 : 2; }
// "fp32", "bf16", "fp16": the words of the configuration file.
const char* dtype_name(Dtype dtype);

// out[i] = round(parts[0][i] + parts[1][i] + ...): fp32 sums in the order of `parts`, one rounding
// to out_dtype at the end. One part: a conversion. `out` may be one of the parts if the dtypes have
// equal size, and may not overlap them in any other way. num_parts >= 1.
void sum_parts(void* out, Dtype out_dtype, const void* const* parts, int num_parts, Dtype in_dtype, std::int64_t numel,
               Stores stores = Stores::Cached);

// memcpy on OpenMP's threads, as parallel_ranges() shares bytes out.
void copy(void* to, const void* from, std::int64_t bytes, Stores stores = Stores::Cached);

// out[i] = round(in[i]). In place if the dtypes have equal size.
void convert(void* out, Dtype out_dtype, const void* in, Dtype in_dtype, std::int64_t numel);

// acc[i] = round(fp32(acc[i]) + fp32(in[i])).
void accumulate(void* acc, Dtype acc_dtype, const void* in, Dtype in_dtype, std::int64_t numel);

// data[i] = round(fp32(data[i]) * factor).
void scale(void* data, Dtype dtype, float factor, std::int64_t numel);

// Sum of squares in fp64. The order of summation depends on numel alone: 65,536-element pieces of 32
// interleaved sums each, then the pieces in order; so the result is the same on every SIMD target
// and for any number of threads, but not the sum of the results of a cut. Any Inf or NaN in the
// input gives Inf or NaN; finite input gives a finite result.
double sum_of_squares(const void* in, Dtype in_dtype, std::int64_t numel);

// Index of the first Inf or NaN, or -1.
std::int64_t first_non_finite(const void* in, Dtype in_dtype, std::int64_t numel);

// Calls range(begin, end) over [0, numel) in pieces that are cut at multiples of 1024, on OpenMP's
// threads if numel is above about a million, else on this one. `range` must not throw.
void parallel_ranges(std::int64_t numel, const std::function<void(std::int64_t, std::int64_t)>& range);

// The SIMD target in use ("AVX3" is AVX-512, "SCALAR" the fall-back), and those that this CPU can run.
std::string simd_target();
std::vector<std::string> simd_targets();
// For tests: uses one of simd_targets() from now on, or again the best one if `name` is empty. Not
// while kernels run.
void set_simd_target(const std::string& name);

}  // namespace zero::kernels
