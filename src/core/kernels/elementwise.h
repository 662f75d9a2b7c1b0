// Element-wise arithmetic on flat memory: gradient sums, conversions, and the square sum of the global norm. The SIMD
// target is selected at run time (AVX-512, AVX2, NEON, else scalar); large calls use OpenMP.
//
// [Note: same bits] Every element-wise function gives the same bits on every SIMD target, for any number of threads and
// any division of a range (NaN stays NaN; its payload is unspecified). 16-bit values are read exactly and written with
// one round-to-nearest-even from fp32. Raw pointers with element alignment; no torch, no communication. A negative
// count, or a null pointer for a non-empty range, is an InternalError.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace zero::kernels {

enum class Dtype { F32, BF16, F16 };

// How a result is written. Streaming bypasses the caches, which avoids reading the overwritten memory; for results that
// would be evicted before use. The bits are the same.
enum class Stores { Cached, Streaming };

// Bytes of one element.
constexpr std::size_t size_of(Dtype dtype) { return dtype == Dtype::F32 ? 4 : 2; }
// "fp32", "bf16", "fp16", as in configuration files.
const char* dtype_name(Dtype dtype);

// out[i] = round(parts[0][i] + parts[1][i] + ...): fp32 sums in the order of `parts`, rounded once to out_dtype. One
// part: a conversion. `out` may be one of the parts if the dtypes have equal size; it must not overlap them otherwise.
// num_parts >= 1.
void sum_parts(void* out, Dtype out_dtype, const void* const* parts, int num_parts, Dtype in_dtype, std::int64_t numel,
               Stores stores = Stores::Cached);

// memcpy with OpenMP threads, divided as in parallel_ranges().
void copy(void* to, const void* from, std::int64_t bytes, Stores stores = Stores::Cached);

// out[i] = round(in[i]). May be in place if the dtypes have equal size.
void convert(void* out, Dtype out_dtype, const void* in, Dtype in_dtype, std::int64_t numel);

// acc[i] = round(fp32(acc[i]) + fp32(in[i])).
void accumulate(void* acc, Dtype acc_dtype, const void* in, Dtype in_dtype, std::int64_t numel);

// data[i] = round(fp32(data[i]) * factor).
void scale(void* data, Dtype dtype, float factor, std::int64_t numel);

// Sum of squares in fp64. The order of summation depends on numel only: pieces of 65,536 elements with 32 interleaved
// sums each, added in order. The result is the same on every SIMD target and for any number of threads; results of
// parts of a range do not add up to it exactly. Any Inf or NaN in the input gives Inf or NaN; finite input gives a
// finite result. offset: the position of in[0] in the range of which this is the end; pieces are divided as in the
// range.
double sum_of_squares(const void* in, Dtype in_dtype, std::int64_t numel, std::int64_t offset = 0);

// Index of the first Inf or NaN, or -1.
std::int64_t first_non_finite(const void* in, Dtype in_dtype, std::int64_t numel);

// Work up to this size is done by one thread: an update of so many elements (about 70 us), a copy of so many bytes.
inline constexpr std::int64_t kMostSerialNumel = std::int64_t{1} << 17;
inline constexpr std::int64_t kMostSerialBytes = std::int64_t{1} << 20;

// Calls range(begin, end) for pieces of [0, numel), divided at multiples of 1024, with OpenMP threads if numel is above
// max_serial. `range` must not throw.
void parallel_ranges(std::int64_t numel, const std::function<void(std::int64_t, std::int64_t)>& range,
                     std::int64_t max_serial = kMostSerialNumel);

// The SIMD target in use ("AVX3" is AVX-512, "SCALAR" the fallback), and the targets that this CPU supports.
std::string simd_target();
std::vector<std::string> simd_targets();
// For tests: uses one of simd_targets(); empty: the best one. Not while kernels run.
void set_simd_target(const std::string& name);

}  // namespace zero::kernels
