// The per-element operations of GPU threads: sums of parts, accumulation, scaling and interleaved square sums, in the
// order of kernels/elementwise.h, with the same bits. The host can call them too, for tests. The update rules are in
// rules.h; kernels.cu maps threads to elements.
#pragma once
#include "kernels/cuda/arithmetic.h"

namespace zero::cuda {

// Pointers of one launch, passed as a kernel argument (at most 4 KiB).
inline constexpr int kMaxParts = 448;
struct Parts {
  const void* of[kMaxParts];
  int count;
};

struct SumParts {
  void* out;
  Dtype out_dtype, in_dtype;
  Parts parts;

  ZERO_HOST_DEVICE void element(std::int64_t i) const {
    float sum = load(parts.of[0], in_dtype, i);
    for (int p = 1; p < parts.count; ++p) sum = add(sum, load(parts.of[p], in_dtype, i));
    store(out, out_dtype, i, sum);
  }
  ZERO_HOST_DEVICE void quad(std::int64_t i) const {
    Quad sum = load_quad(parts.of[0], in_dtype, i);
    for (int p = 1; p < parts.count; ++p) {
      const Quad part = load_quad(parts.of[p], in_dtype, i);
      for (int k = 0; k < kQuad; ++k) sum.of[k] = add(sum.of[k], part.of[k]);
    }
    store_quad(out, out_dtype, i, sum);
  }
};

struct Accumulate {
  void* to;
  Dtype to_dtype;
  const void* in;
  Dtype in_dtype;

  ZERO_HOST_DEVICE void element(std::int64_t i) const {
    store(to, to_dtype, i, add(load(to, to_dtype, i), load(in, in_dtype, i)));
  }
  ZERO_HOST_DEVICE void quad(std::int64_t i) const {
    Quad sum = load_quad(to, to_dtype, i);
    const Quad part = load_quad(in, in_dtype, i);
    for (int k = 0; k < kQuad; ++k) sum.of[k] = add(sum.of[k], part.of[k]);
    store_quad(to, to_dtype, i, sum);
  }
};

struct Scale {
  void* data;
  Dtype dtype;
  float factor;

  ZERO_HOST_DEVICE void element(std::int64_t i) const { store(data, dtype, i, multiply(load(data, dtype, i), factor)); }
  ZERO_HOST_DEVICE void quad(std::int64_t i) const {
    Quad values = load_quad(data, dtype, i);
    for (int k = 0; k < kQuad; ++k) values.of[k] = multiply(values.of[k], factor);
    store_quad(data, dtype, i, values);
  }
};

// As in kernels::sum_of_squares: elements per piece, and interleaved sums.
inline constexpr std::int64_t kSquarePiece = 65536;
inline constexpr int kSquareLanes = 32;

// Sum `lane` of the piece that starts at `begin`. The product of two fp32 values is exact in fp64, so fused and
// separate multiply-adds agree.
ZERO_HOST_DEVICE double lane_sum_of_squares(const void* in, Dtype dtype, std::int64_t numel, std::int64_t begin,
                                            int lane) {
  const auto end = begin + kSquarePiece < numel ? begin + kSquarePiece : numel;
  double sum = 0;
#ifdef __CUDA_ARCH__
#pragma unroll 8
#endif
  for (auto i = begin + lane; i < end; i += kSquareLanes) {
    const double x = load(in, dtype, i);
    sum = add(sum, x * x);
  }
  return sum;
}

}  // namespace zero::cuda
