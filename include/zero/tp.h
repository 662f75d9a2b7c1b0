// Differentiable functions over the ranks of a tensor-parallel group: the mappings f and g of Megatron-LM
// (arXiv:1909.08053) and those of its sequence regions (arXiv:2205.05198).
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/communicator.h>
#include <zero/export.h>

namespace zero::tp {

// All functions are [collective] over `group`, in forward or in backward or in both: every rank calls them, and runs
// backward, in the same order. They block until they are complete. With one rank they return x. x: fp32, bf16 or fp16,
// of any strides. Sums are taken in fp32 in rank order and rounded once to x's dtype. They are differentiable once.
// Errors are the Communicator's; ConfigError for a dimension or lengths that x does not have.
//
// dim: may be negative. lengths: of each rank's part along dim; empty: n elements are divided as
// [floor(j * n / t), floor((j + 1) * n / t)).
using Group = std::shared_ptr<Communicator>;
using Lengths = std::vector<std::int64_t>;

// x; the gradient is summed over the ranks (Megatron's f). x: equal on all ranks.
ZERO_API at::Tensor copy(const at::Tensor& x, const Group& group);
// The sum of x over the ranks; the gradient is passed as it is (Megatron's g).
ZERO_API at::Tensor reduce(const at::Tensor& x, const Group& group);
// This rank's part of x along dim; the gradient is all-gathered. x: equal on all ranks.
ZERO_API at::Tensor scatter(const at::Tensor& x, const Group& group, std::int64_t dim, const Lengths& lengths = {});
// The parts of all ranks along dim; the gradient is this rank's part of it. What follows is the same on all ranks.
ZERO_API at::Tensor gather(const at::Tensor& x, const Group& group, std::int64_t dim, const Lengths& lengths = {});
// The same; the gradient is reduce-scattered. What follows is divided over the ranks.
ZERO_API at::Tensor gather_split(const at::Tensor& x, const Group& group, std::int64_t dim,
                                 const Lengths& lengths = {});
// This rank's part along dim of the sum of x over the ranks; the gradient is all-gathered.
ZERO_API at::Tensor reduce_scatter(const at::Tensor& x, const Group& group, std::int64_t dim,
                                   const Lengths& lengths = {});

// Rows `ids` of an embedding of `vocabulary` rows, of which this rank has rows [begin, begin + weight.size(0)). ids:
// int64 or int32, equal on all ranks. Returns [ids.sizes(), weight.size(1)], the same on all ranks. The gradient of
// weight is local. Throws c10::IndexError on all ranks for an id outside of [0, vocabulary). padding_idx: a row of the
// whole embedding that gets no gradient, or negative.
ZERO_API at::Tensor vocab_parallel_embedding(const at::Tensor& weight, const at::Tensor& ids, const Group& group,
                                             std::int64_t begin, std::int64_t vocabulary,
                                             std::int64_t padding_idx = -1);

}  // namespace zero::tp
