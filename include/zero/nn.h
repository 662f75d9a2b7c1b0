// Layers for tensor parallelism with sequence regions (Korthikanti et al., arXiv:2205.05198), which a plan of names
// cannot give to an unmodified module. Not part of zero.h: it needs torch's modules.
//
// Every layer is a plain module with whole parameters, and draws the same initial values as its counterpart in
// torch::nn. Without an Engine, or with one tensor-parallel rank, it computes as that. An Engine cuts its parameters as
// a plan would (docs/parallelism.md).
//
// sequence: what is between a row and the next column layer is [batch, tokens / t, features], this rank's stretch of
// the tokens, instead of a copy on every rank. The embedding and row layers reduce-scatter their outputs along dim 1,
// column layers all-gather their inputs. Tokens must be a multiple of the tensor-parallel ranks, else ConfigError. All
// layers of a model must agree on it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <zero/export.h>

namespace zero::nn {

// How an Engine cuts one parameter of a layer.
struct LayerCut {
  enum class Kind : std::uint8_t { Whole, Column, Row };
  std::string parameter;  // "weight", "bias"
  Kind kind = Kind::Whole;
  std::vector<std::int64_t> pieces{};  // of a fused weight, cut separately; {}: not fused
  std::int64_t multiple = 1;           // of elements, at which it is cut
  bool gather_output = false, scatter_input = false;
  bool sequence = false;      // inputs or outputs of products are divided along dim 1
  bool sum_gradient = false;  // Whole: each rank has the gradient of its tokens only
};
struct ZERO_API ParallelLayer {
  virtual ~ParallelLayer() = default;
  virtual std::vector<LayerCut> cuts() const = 0;
};

struct ColumnParallelLinearOptions {
  std::int64_t in_features, out_features;
  bool bias = true, gather_output = false;
  std::vector<std::int64_t> pieces{};  // lengths of the pieces of a fused weight; {}: not fused
  std::int64_t multiple = 1;           // of outputs, at which it is cut: the head width, for attention
  bool sequence = false;
};
// x: [.., in] -> [.., this rank's part of out], or all of it with gather_output.
struct ZERO_API ColumnParallelLinearImpl : torch::nn::Cloneable<ColumnParallelLinearImpl>, ParallelLayer {
  explicit ColumnParallelLinearImpl(ColumnParallelLinearOptions options);
  void reset() override;
  at::Tensor forward(const at::Tensor& x);
  std::vector<LayerCut> cuts() const override;

  ColumnParallelLinearOptions options;
  at::Tensor weight, bias;  // [out, in], [out]
};
TORCH_MODULE(ColumnParallelLinear);

struct RowParallelLinearOptions {
  std::int64_t in_features, out_features;
  bool bias = true;
  bool input_is_parallel = true;  // false: x is whole, and each rank takes its features
  std::int64_t multiple = 1;      // of inputs, at which it is cut
  bool sequence = false;
};
// x: [.., this rank's part of in] -> [.., out], summed over the ranks.
struct ZERO_API RowParallelLinearImpl : torch::nn::Cloneable<RowParallelLinearImpl>, ParallelLayer {
  explicit RowParallelLinearImpl(RowParallelLinearOptions options);
  void reset() override;
  at::Tensor forward(const at::Tensor& x);
  std::vector<LayerCut> cuts() const override;

  RowParallelLinearOptions options;
  at::Tensor weight, bias;  // [out, in], [out]
};
TORCH_MODULE(RowParallelLinear);

struct VocabParallelEmbeddingOptions {
  std::int64_t num_embeddings, embedding_dim;
  bool sequence = false;
};
// ids: [batch, tokens] -> [batch, tokens, dim], or [batch, tokens / t, dim] with sequence.
struct ZERO_API VocabParallelEmbeddingImpl : torch::nn::Cloneable<VocabParallelEmbeddingImpl>, ParallelLayer {
  explicit VocabParallelEmbeddingImpl(VocabParallelEmbeddingOptions options);
  void reset() override;
  at::Tensor forward(const at::Tensor& ids);
  std::vector<LayerCut> cuts() const override;

  VocabParallelEmbeddingOptions options;
  at::Tensor weight;  // [num_embeddings, dim]
};
TORCH_MODULE(VocabParallelEmbedding);

struct LayerNormOptions {
  std::int64_t features;
  double eps = 1e-5;
  bool sequence = false;  // x is a stretch of the tokens, so gradients are summed over the ranks
};
struct ZERO_API LayerNormImpl : torch::nn::Cloneable<LayerNormImpl>, ParallelLayer {
  explicit LayerNormImpl(LayerNormOptions options);
  void reset() override;
  at::Tensor forward(const at::Tensor& x);
  std::vector<LayerCut> cuts() const override;

  LayerNormOptions options;
  at::Tensor weight, bias;
};
TORCH_MODULE(LayerNorm);

}  // namespace zero::nn
