// Sequence parallelism over attention heads: DeepSpeed-Ulysses (arXiv:2309.14509). Each "sp" rank has a stretch of the
// tokens of every sample (Mesh::tokens). Everything but attention is computed per token, without communication. For
// attention, one all-to-all gives each rank all tokens of some of the heads, and another takes the result back.
#pragma once
#include <array>
#include <cstdint>

#include <ATen/core/Tensor.h>

#include <zero/export.h>
#include <zero/mesh.h>

namespace zero {

// All calls are [collective] over mesh.group("sp"), in forward and in backward. x: [batch, tokens, heads, width], any
// dtype and strides. tokens: of the whole sequence; 0: all ranks have as many as this one. Rank i of u has the heads
// [floor(i * a / u), floor((i + 1) * a / u)) of a. With one rank they return x. ConfigError for other shapes, for
// tokens that are not this rank's stretch, and for fewer heads than ranks.

// [batch, tokens of this rank, all heads, width] -> [batch, all tokens, heads of this rank, width].
ZERO_API at::Tensor sequence_to_heads(const at::Tensor& x, const Mesh& mesh, std::int64_t tokens = 0);
// The reverse. heads: of the whole; 0: all ranks have as many as this one.
ZERO_API at::Tensor heads_to_sequence(const at::Tensor& x, const Mesh& mesh, std::int64_t tokens = 0,
                                      std::int64_t heads = 0);

// q, k and v by one all-to-all. k and v may have fewer heads than q, a divisor of them (grouped-query attention); a
// head of theirs is sent to every rank that has a head of its group. Where the query heads of a rank's groups differ in
// number, its keys and values are repeated: one head for each query head.
ZERO_API std::array<at::Tensor, 3> sequence_to_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                     const Mesh& mesh, std::int64_t tokens = 0);

// local(q, k, v): attention of all tokens with this rank's heads, for example
// scaled_dot_product_attention of the transposed tensors; returns [batch, tokens, heads, width]. q: [batch, tokens of
// this rank, heads, width]. The result has q's shape.
template <class Attention>
at::Tensor attention_over_heads(const Mesh& mesh, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                Attention&& local, std::int64_t tokens = 0) {
  const auto of_heads = sequence_to_heads(q, k, v, mesh, tokens);
  return heads_to_sequence(local(of_heads[0], of_heads[1], of_heads[2]), mesh, tokens, q.size(2));
}

}  // namespace zero
