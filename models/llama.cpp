// See llama.h.
#include "models/llama.h"

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "models/cross_entropy.h"
#include "models/fused.h"

namespace models {

LlamaLayerImpl::LlamaLayerImpl(const LlamaConfig& config)
    : heads_(config.heads), kv_heads_(config.kv_heads), dropout_(config.attention_dropout) {
  const std::int64_t queries = config.heads * config.width(), keys = config.kv_heads * config.width();
  const auto linear = [&](std::int64_t in, std::int64_t out, bool bias) {
    return Linear(in, out, bias, config.deviation);
  };
  const auto attention = make_path(*this, "self_attn");
  q_ = attention->register_module("q_proj", linear(config.hidden, queries, config.attention_bias));
  k_ = attention->register_module("k_proj", linear(config.hidden, keys, config.attention_bias));
  v_ = attention->register_module("v_proj", linear(config.hidden, keys, config.attention_bias));
  o_ = attention->register_module("o_proj", linear(queries, config.hidden, config.attention_bias));
  const auto mlp = make_path(*this, "mlp");
  gate_ = mlp->register_module("gate_proj", linear(config.hidden, config.inner, config.mlp_bias));
  up_ = mlp->register_module("up_proj", linear(config.hidden, config.inner, config.mlp_bias));
  down_ = mlp->register_module("down_proj", linear(config.inner, config.hidden, config.mlp_bias));
  before_ = register_module("input_layernorm", RmsNorm(config.hidden, config.norm_epsilon));
  after_ = register_module("post_attention_layernorm", RmsNorm(config.hidden, config.norm_epsilon));
}

at::Tensor LlamaLayerImpl::forward(const at::Tensor& x, const Rotary& rotary, const Visible& visible, KeyValues* kept) {
  const at::Tensor norm = before_(x);
  const at::Tensor q = rotate_halves(split_heads(q_(norm), heads_), rotary.cos, rotary.sin);
  at::Tensor k = rotate_halves(split_heads(k_(norm), kv_heads_), rotary.cos, rotary.sin),
             v = split_heads(v_(norm), kv_heads_);
  if (kept != nullptr) std::tie(k, v) = kept->append(k, v);
  const at::Tensor y = x + o_(merge_heads(attend(q, k, v, visible, is_training() ? dropout_ : 0)));
  const at::Tensor inner = after_(y);
  return y + down_(gated_silu(gate_(inner), up_(inner)));
}

LlamaImpl::LlamaImpl(LlamaConfig config) : config_(std::move(config)) {
  config_.validate();
  const auto model = make_path(*this, "model");
  token_ = model->register_module(
      "embed_tokens", make_embedding(config_.vocabulary, config_.hidden, config_.deviation, config_.pad_token));
  layers_ = model->register_module("layers", torch::nn::ModuleList());
  for (std::int64_t i = 0; i < config_.layers; ++i) layers_->push_back(LlamaLayer(config_));
  norm_ = model->register_module("norm", RmsNorm(config_.hidden, config_.norm_epsilon));
  output_ = register_module("lm_head", config_.tied_output
                                           ? Linear(token_->weight, at::Tensor())
                                           : Linear(config_.hidden, config_.vocabulary, false, config_.deviation));
}

Rotary LlamaImpl::rotary(const at::Tensor& positions, const at::Tensor& like) const {
  const Rotary wide = rotary_of(config_, positions);
  return {wide.cos.to(like.scalar_type()), wide.sin.to(like.scalar_type())};
}

at::Tensor LlamaImpl::features(const at::Tensor& tokens, const at::Tensor& mask) {
  check_tokens("Llama::forward", tokens, config_.sequence);
  const std::int64_t time = tokens.size(1);
  const at::Tensor x = token_(tokens);
  const auto rotary = this->rotary(torch::arange(time, tokens.options()), x);
  const Visible seen = visible(mask, time, time, /*causal=*/true, x);
  return norm_(segments_.run(config_.layers, x, [this, rotary, seen](std::int64_t i, const at::Tensor& y) {
    return layers_[static_cast<std::size_t>(i)]->as<LlamaLayerImpl>()->forward(y, rotary, seen);
  }));
}

at::Tensor LlamaImpl::head(const at::Tensor& features) { return output_(features); }

at::Tensor LlamaImpl::forward(const at::Tensor& tokens, const at::Tensor& mask) { return head(features(tokens, mask)); }

at::Tensor LlamaImpl::loss(const at::Tensor& tokens, const at::Tensor& targets, const at::Tensor& mask) {
  check_targets("Llama::loss", tokens, targets);
  return cross_entropy(forward(tokens, mask).flatten(0, 1), targets.flatten());
}

at::Tensor LlamaImpl::next(const at::Tensor& tokens, DecoderState& state) {
  state.begin(config_.layers, tokens, "Llama::next", config_.sequence);
  at::Tensor x = token_(tokens);
  const auto rotary = this->rotary(state.positions(tokens), x);
  const Visible seen = visible(state.mask(), tokens.size(1), state.length() + tokens.size(1), /*causal=*/true, x);
  for (std::int64_t i = 0; i < config_.layers; ++i)
    x = layers_[static_cast<std::size_t>(i)]->as<LlamaLayerImpl>()->forward(x, rotary, seen, &state.layer(i));
  state.end(tokens.size(1));
  return head(norm_(x.select(1, -1)));
}

at::Tensor LlamaImpl::generate(const at::Tensor& tokens, std::int64_t count, const Sampling& sampling,
                               const at::Tensor& mask) {
  if (tokens.dim() == 2 && tokens.size(1) + count > config_.sequence)
    throw std::invalid_argument("[Llama::generate] got " + std::to_string(tokens.size(1)) + " tokens and count " +
                                std::to_string(count) + ", expected at most " + std::to_string(config_.sequence) +
                                " together");
  DecoderState state(mask);
  return generate_by(
      *this, [&](const at::Tensor& newest) { return next(newest, state); }, tokens, count, sampling);
}

}  // namespace models
