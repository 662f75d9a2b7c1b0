// Rows of tokens for experts, and back (MegaBlocks' permutation, arXiv:2211.15841, without its sort: the places are
// known from counting). No element is written twice, so results do not depend on the number of threads. Both can be
// differentiated any number of times.
#pragma once
#include <ATen/core/Tensor.h>

#include "parallel/gate.h"

namespace zero::parallel {

// The rows of all kept choices: x[token]. x: [n, width] of a floating dtype; returns [rows, width]. Differentiable.
at::Tensor dispatch(const at::Tensor& x, const Routing& routing);

// The reverse: y[token] = the sum of weight * row over its kept choices, first to last, in fp32 (fp64 for fp64),
// rounded once to the dtype of `rows`; 0 without any. weights: [n, k]. Differentiable in both.
at::Tensor combine(const at::Tensor& rows, const at::Tensor& weights, const Routing& routing);

}  // namespace zero::parallel
