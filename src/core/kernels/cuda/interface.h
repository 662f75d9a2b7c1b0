// The interface of the plug-in library libzero_cuda.so: one table of C functions, without CUDA types, torch types or
// exceptions. The plug-in needs only the CUDA runtime. Tensors and streams come from libtorch's CUDA library, which the
// loader (plugin.h) opens first.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/elementwise.h"
#include "kernels/update_simd.h"

namespace zero::cuda {

// A device by its number, and a cudaStream_t of it (null: the device's default stream).
struct Place {
  int device;
  void* stream;
};

// Both sides belong to one build; a table of another version is rejected.
inline constexpr std::uint32_t kInterfaceVersion = 5;
inline constexpr const char* kPlugin = "libzero_cuda.so";
inline constexpr const char* kEntry = "zero_cuda_interface";

// One of the vectors whose sums of squares one launch computes. `result` is in device memory.
struct SquaredVector {
  const void* in;
  kernels::Dtype dtype;
  std::int64_t numel;
  double* result;
};

// The gradients' norm in a step, as far as an update needs it; in device memory.
struct StepNorm {
  double total;  // sum of squares over all ranks
  float factor;  // of every gradient element, see optim/clipping.h
  int skip;      // the update must not change anything
};
// What determines it besides the sums of squares: as in optim/clipping.h.
struct NormSettings {
  double scale, clip, postmultiply;
  int checks_overflow;  // a sum that is not finite skips the update
};
inline constexpr int kMaxOrder = 8000;

// All functions except error_text, device_count, allocate_host and free_host enqueue work on the stream and return at
// once: 0, or an error of the CUDA runtime for error_text, possibly one of an earlier kernel. All pointers are to
// device memory, except `parts`, `vectors`, `ranges` and `constants` themselves, which may be freed on return. Results
// are bit-identical to kernels/elementwise.h and kernels/update_simd.h ([Note: same bits]); NaN stays NaN.
struct Interface {
  std::uint32_t version;
  const char* (*error_text)(int status);
  int (*device_count)(int* count);

  // num_parts: at most kMaxParts (elements.h).
  int (*sum_parts)(Place place, void* out, kernels::Dtype out_dtype, const void* const* parts, int num_parts,
                   kernels::Dtype in_dtype, std::int64_t numel);
  int (*convert)(Place place, void* out, kernels::Dtype out_dtype, const void* in, kernels::Dtype in_dtype,
                 std::int64_t numel);
  int (*accumulate)(Place place, void* to, kernels::Dtype to_dtype, const void* in, kernels::Dtype in_dtype,
                    std::int64_t numel);
  int (*scale)(Place place, void* data, kernels::Dtype dtype, float factor, std::int64_t numel);
  // `pieces`: scratch for the sum of square_pieces(numel) values, in use until the work is done.
  int (*sums_of_squares)(Place place, const SquaredVector* vectors, int count, double* pieces);
  // Writes the index, or -1, to *result in device memory.
  int (*first_non_finite)(Place place, const void* in, kernels::Dtype dtype, std::int64_t numel, std::int64_t* result);
  int (*update)(Place place, const kernels::UpdateConstants* constants, float factor, const kernels::SizedRange* ranges,
                int count);
  // The same with the factor of `norm`, in device memory, unless it skips the update.
  int (*update_by_norm)(Place place, const kernels::UpdateConstants* constants, const StepNorm* norm,
                        const kernels::SizedRange* ranges, int count);
  // out[0] <- the sum of groups of sums[order[k]], each group followed by -1 in `order`: groups are added in order, and
  // sums in each group. out[1] <- the bits of `tag`. count: at most kMaxOrder. `order` may be freed on return.
  int (*add_sums)(Place place, const double* sums, const int* order, int count, std::uint64_t tag, double* out);
  // parts: each rank's result of add_sums. Tags that differ skip the update.
  int (*step_norm)(Place place, const double* parts, int num_parts, NormSettings settings, StepNorm* norm);
  // Page-locked host memory that all GPUs can copy from and to, of `bytes` rounded up to pages. Blocking. Call
  // free_host() with the same number when no copy uses it.
  int (*allocate_host)(int device, std::size_t bytes, void** data);
  int (*free_host)(int device, void* data, std::size_t bytes);
};

using Entry = const Interface* (*)();

// Number of scratch values that sums_of_squares needs for one vector.
constexpr std::int64_t square_pieces(std::int64_t numel) { return (numel + 65535) / 65536; }

}  // namespace zero::cuda
