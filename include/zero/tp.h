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
// vocab_parallel_rows: the same before the sum, [local]: zeros for ids of other ranks.
ZERO_API at::Tensor vocab_parallel_rows(const at::Tensor& weight, const at::Tensor& ids, std::int64_t begin,
                                        std::int64_t vocabulary, std::int64_t padding_idx = -1);
ZERO_API at::Tensor vocab_parallel_embedding(const at::Tensor& weight, const at::Tensor& ids, const Group& group,
                                             std::int64_t begin, std::int64_t vocabulary,
                                             std::int64_t padding_idx = -1);

// Part p of `in`, flat, goes to rank p; out likewise: in_numels[p] and out_numels[p] elements. The gradient goes back
// the same way. [collective]
ZERO_API at::Tensor all_to_all(const at::Tensor& in, const Group& group, const std::vector<std::int64_t>& out_numels,
                               const std::vector<std::int64_t>& in_numels);

struct CrossEntropyOptions {
  std::int64_t ignore_index = -100;  // rows with this target do not count
  // As Megatron-LM's: a target has 1 - label_smoothing, every other class label_smoothing / (V - 1). torch's value of
  // the same name is this one times V / (V - 1).
  double label_smoothing = 0;
  std::int64_t vocabulary = 0;  // of all ranks; 0: each has as many columns as this one
};

// Mean cross entropy in nats, a scalar in fp32, of logits that are divided over the vocabulary: rank j of t has columns
// [floor(j * V / t), floor((j + 1) * V / t)). logits: [n, columns of this rank], any floating dtype; targets: int64
// [n], equal on all ranks. One all-gather of 3 fp32 numbers a row (4 with label smoothing); backward is local. If none
// counts, NaN with gradient 0, as torch's. Throws c10::IndexError on all ranks for a target outside of the vocabulary.
ZERO_API at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets, const Group& group,
                                  const CrossEntropyOptions& options = {});

}  // namespace zero::tp
