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

// Sum `lane` of the elements [begin, end), in order. Several loads are issued before the first addition, which waits
// for memory. The product of two fp32 values is exact in fp64, so fused and separate multiply-adds agree.
template <Dtype kDtype>
ZERO_HOST_DEVICE double lane_sum_of_squares(const void* in, std::int64_t begin, std::int64_t end, int lane) {
  constexpr int kLoads = 16;
  double sum = 0;
  auto i = begin + lane;
  for (; i + (kLoads - 1) * kSquareLanes < end; i += kLoads * kSquareLanes) {
    float x[kLoads];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int k = 0; k < kLoads; ++k) x[k] = load(in, kDtype, i + k * kSquareLanes);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int k = 0; k < kLoads; ++k) sum = fused_multiply_add(double{x[k]}, double{x[k]}, sum);
  }
  for (; i < end; i += kSquareLanes) {
    const double x = load(in, kDtype, i);
    sum = fused_multiply_add(x, x, sum);
  }
  return sum;
}

// The same for piece `piece` of a vector.
ZERO_HOST_DEVICE double lane_sum_of_squares(const void* in, Dtype dtype, std::int64_t numel, std::int64_t piece,
                                            int lane) {
  const auto begin = piece * kSquarePiece;
  const auto end = begin + kSquarePiece < numel ? begin + kSquarePiece : numel;
  if (dtype == Dtype::F32) return lane_sum_of_squares<Dtype::F32>(in, begin, end, lane);
  if (dtype == Dtype::BF16) return lane_sum_of_squares<Dtype::BF16>(in, begin, end, lane);
  return lane_sum_of_squares<Dtype::F16>(in, begin, end, lane);
}

// The tasks of one launch over many vectors, each with the number of its first block: the task of `block` is the last
// one that begins at or before it.
template <class Task>
ZERO_HOST_DEVICE int task_of(const Task* tasks, int count, unsigned block) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (tasks[middle].first_block <= block)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

}  // namespace zero::cuda
