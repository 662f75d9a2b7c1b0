// The GPT of models/gpt.h out of the layers of zero/nn.h: with `sequence`, what is between attention and MLP is divided
// over the tensor-parallel ranks along the tokens. Names and shapes of parameters are those of models/gpt.h.
#pragma once
#include <torch/nn/init.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>
#include <zero/library.h>
#include <zero/nn.h>

#include <cstdint>

struct MegatronGptConfig {
  std::int64_t layers = 2, hidden = 32, heads = 4, sequence = 16, vocabulary = 64;
  bool sequence_regions = true;
};

struct MegatronBlockImpl : torch::nn::Module {
  explicit MegatronBlockImpl(const MegatronGptConfig& c) : width_(c.hidden / c.heads) {
    const bool s = c.sequence_regions;
    norm1_ =
        register_module("norm1", zero::nn::LayerNorm(zero::nn::LayerNormOptions{.features = c.hidden, .sequence = s}));
    qkv_ = register_module("qkv", zero::nn::ColumnParallelLinear(
                                      zero::nn::ColumnParallelLinearOptions{.in_features = c.hidden,
                                                                            .out_features = 3 * c.hidden,
                                                                            .pieces = {c.hidden, c.hidden, c.hidden},
                                                                            .multiple = width_,
                                                                            .sequence = s}));
    projection_ = register_module(
        "projection", zero::nn::RowParallelLinear(zero::nn::RowParallelLinearOptions{
                          .in_features = c.hidden, .out_features = c.hidden, .multiple = width_, .sequence = s}));
    norm2_ =
        register_module("norm2", zero::nn::LayerNorm(zero::nn::LayerNormOptions{.features = c.hidden, .sequence = s}));
    up_ = register_module("up", zero::nn::ColumnParallelLinear(zero::nn::ColumnParallelLinearOptions{
                                    .in_features = c.hidden, .out_features = 4 * c.hidden, .sequence = s}));
    down_ = register_module("down", zero::nn::RowParallelLinear(zero::nn::RowParallelLinearOptions{
                                        .in_features = 4 * c.hidden, .out_features = c.hidden, .sequence = s}));
  }

  // x: [batch, tokens, hidden], or this rank's stretch of the tokens.
  at::Tensor forward(const at::Tensor& x) {
    const auto all = qkv_(norm1_(x));  // all tokens, this rank's heads
    const auto qkv = all.view({all.size(0), all.size(1), 3, -1, width_}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto mixed = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0, /*is_causal=*/true);
    const auto y = x + projection_(mixed.transpose(1, 2).reshape({all.size(0), all.size(1), -1}));
    return y + down_(torch::gelu(up_(norm2_(y)), "tanh"));
  }

 private:
  std::int64_t width_;
  zero::nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  zero::nn::ColumnParallelLinear qkv_{nullptr}, up_{nullptr};
  zero::nn::RowParallelLinear projection_{nullptr}, down_{nullptr};
};
TORCH_MODULE(MegatronBlock);

struct MegatronGptImpl : torch::nn::Module {
  explicit MegatronGptImpl(const MegatronGptConfig& c) : config_(c) {
    token_ = register_module(
        "token", zero::nn::VocabParallelEmbedding(zero::nn::VocabParallelEmbeddingOptions{
                     .num_embeddings = c.vocabulary, .embedding_dim = c.hidden, .sequence = c.sequence_regions}));
    torch::nn::init::normal_(token_->weight, 0, 0.02);  // also the output layer's
    position_ = register_parameter("position", torch::randn({c.sequence, c.hidden}) * 0.02);
    blocks_ = register_module("blocks", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < c.layers; ++i) blocks_->push_back(MegatronBlock(c));
    norm_ = register_module(
        "norm", zero::nn::LayerNorm(zero::nn::LayerNormOptions{.features = c.hidden, .sequence = c.sequence_regions}));
  }

  // tokens: int64 [batch, tokens], equal on all tensor-parallel ranks. Returns the logits [batch, tokens, vocabulary].
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = token_(tokens);
    // Each rank adds the positions of its stretch. scatter() all-gathers their gradient.
    x = x + positions(tokens.size(1), x.size(1));
    for (const auto& block : *blocks_) x = block->as<MegatronBlockImpl>()->forward(x);
    return torch::linear(norm_(x), token_->weight);  // tied
  }

  // The tensor-parallel group, which an Engine has after it was made.
  void set_group(std::shared_ptr<zero::Communicator> group) { group_ = std::move(group); }

 private:
  at::Tensor positions(std::int64_t tokens, std::int64_t own) const {
    const auto all = position_.narrow(0, 0, tokens);
    return own == tokens || !group_ ? all : zero::tp::scatter(all, group_, 0);
  }

  MegatronGptConfig config_;
  std::shared_ptr<zero::Communicator> group_;
  zero::nn::VocabParallelEmbedding token_{nullptr};
  at::Tensor position_;
  torch::nn::ModuleList blocks_{nullptr};
  zero::nn::LayerNorm norm_{nullptr};
};
TORCH_MODULE(MegatronGpt);
