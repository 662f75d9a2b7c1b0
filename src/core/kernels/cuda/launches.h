// The tables that launches over many vectors take as their kernel argument, and the shapes of the launches. Shared with
// the host's test of what is launched. A kernel argument takes up to 32,764 bytes on sm_70 and later.
#pragma once
#include <cstdint>

#include "kernels/cuda/elements.h"
#include "kernels/cuda/interface.h"
#include "kernels/cuda/rules.h"

namespace zero::cuda {

inline constexpr std::int64_t kMostArgumentBytes = 32764;
inline constexpr int kThreads = 256;
// cudaLaunchKernel accepts up to 2^31 - 1 blocks.
inline constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 31) - 1;
inline constexpr std::int64_t kMostNumel = kMostBlocks * kThreads;

// Sums of squares: one warp per piece.
inline constexpr int kMaxSquared = 512;
inline constexpr int kSquareWarps = 4;
struct SquareTask {
  SquaredVector vector;
  unsigned first_block;  // of square_pieces_kernel, counted in pieces
};
struct Squares {
  int count;
  unsigned num_pieces;
  double* pieces;
  SquareTask tasks[kMaxSquared];
};
static_assert(sizeof(Squares) <= kMostArgumentBytes);

// A block updates kUpdatedPerBlock consecutive elements of one range.
inline constexpr int kMaxUpdated = 256;
inline constexpr int kUpdatedPerBlock = 4 * kThreads * kQuad;
struct UpdateTask {
  kernels::UpdateRange range;
  std::int64_t numel;
  unsigned first_block;
  bool aligned;
};
template <class Algorithm>
struct Updates {
  Algorithm algorithm;
  float factor;
  int count;
  const StepNorm* norm;  // null: `factor`
  UpdateTask tasks[kMaxUpdated];
};
static_assert(sizeof(Updates<Adam<true, true>>) <= kMostArgumentBytes && sizeof(Updates<NAdam>) <= kMostArgumentBytes);

// The places of sums in the order in which they are added, -1 after each group.
struct Order {
  int count;
  int of[kMaxOrder];
};
static_assert(sizeof(Order) + 3 * sizeof(void*) <= kMostArgumentBytes);  // with the other arguments

}  // namespace zero::cuda
