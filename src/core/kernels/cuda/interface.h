// What libzero and its plug-in library libzero_cuda.so agree on: one table of C functions. No CUDA type, no torch
// type and no exception crosses it. The plug-in needs the CUDA runtime only; tensors and streams come from
// libtorch's own CUDA library, which the loader (plugin.h) opens first.
#pragma once
#include <cstdint>

#include "kernels/elementwise.h"
#include "kernels/update_simd.h"

namespace zero::cuda {

// Where and when: a device by its number, and a cudaStream_t of it (null: the device's default stream).
struct Place {
  int device;
  void* stream;
};

// Both sides come from one build; a table of another version is refused.
inline constexpr std::uint32_t kInterfaceVersion = 1;
inline constexpr const char* kPlugin = "libzero_cuda.so";
inline constexpr const char* kEntry = "zero_cuda_interface";

// Every function but the first three puts its work on the stream and returns at once: 0, or an error of the CUDA
// runtime for error_text (also one that an earlier kernel left behind). All pointers are to device memory but for
// `parts` itself, constants and range. The results are those of kernels/elementwise.h and kernels/update_simd.h, bit
// for bit
// ([Note: same bits]); NaN stays NaN.
struct Interface {
  std::uint32_t version;
  const char* (*error_text)(int status);
  int (*device_count)(int* count);

  // num_parts up to kMaxParts (elements.h).
  int (*sum_parts)(Place place, void* out, kernels::Dtype out_dtype, const void* const* parts, int num_parts,
                   kernels::Dtype in_dtype, std::int64_t numel);
  int (*convert)(Place place, void* out, kernels::Dtype out_dtype, const void* in, kernels::Dtype in_dtype,
                 std::int64_t numel);
  int (*accumulate)(Place place, void* to, kernels::Dtype to_dtype, const void* in, kernels::Dtype in_dtype,
                    std::int64_t numel);
  int (*scale)(Place place, void* data, kernels::Dtype dtype, float factor, std::int64_t numel);
  // *result in device memory. `pieces` is scratch for square_pieces(numel) values, left alone until the work is done.
  int (*sum_of_squares)(Place place, const void* in, kernels::Dtype dtype, std::int64_t numel, double* pieces,
                        double* result);
  // *result in device memory: the index, or -1.
  int (*first_non_finite)(Place place, const void* in, kernels::Dtype dtype, std::int64_t numel, std::int64_t* result);
  // Elements [0, numel) of the range.
  int (*update)(Place place, const kernels::UpdateConstants* constants, const kernels::UpdateRange* range, float factor,
                std::int64_t numel);
};

using Entry = const Interface* (*)();

// Values of scratch that sum_of_squares needs.
constexpr std::int64_t square_pieces(std::int64_t numel) { return (numel + 65535) / 65536; }

}  // namespace zero::cuda
