// Sums over ranks on a GPU, with the bits of all transports: in fp32 in rank order, rounded once.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "kernels/cuda/elements.h"

namespace zero::comm::nccl {

// out <- the sum of the parts in their order, on the current stream: one kernel, or with more than `most` parts one per
// part. Equal numel and dtype, in the memory of one GPU. `out` may be one of the parts.
void sum_in_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, int most = cuda::kMaxParts);

}  // namespace zero::comm::nccl
