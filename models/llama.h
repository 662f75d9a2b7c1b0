// Llama for causal language modelling (Touvron et al., 2307.09288): RMSNorm, rotary positions, grouped-query attention,
// SwiGLU. Parameters have the names, shapes and order of rows of transformers' LlamaForCausalLM, so its weights need no
// name map. Plain torch::nn. Parameters may have any floating dtype, which activations share; norms, rotary angles and
// the loss are computed in fp32.
#pragma once
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <utility>

#include "models/decoding.h"
#include "models/generation.h"
#include "models/layers.h"
#include "models/model_configs.h"

namespace models {

struct LlamaLayerImpl : torch::nn::Module {
  explicit LlamaLayerImpl(const LlamaConfig& config);
  // x: [batch, time, hidden]. kept: of earlier time steps, extended by x's; null: x is all there is.
  at::Tensor forward(const at::Tensor& x, const Rotary& rotary, const Visible& visible, KeyValues* kept = nullptr);

 private:
  std::int64_t heads_, kv_heads_;
  double dropout_;
  Linear q_{nullptr}, k_{nullptr}, v_{nullptr}, o_{nullptr}, gate_{nullptr}, up_{nullptr}, down_{nullptr};
  RmsNorm before_{nullptr}, after_{nullptr};
};
TORCH_MODULE(LlamaLayer);

struct LlamaImpl : torch::nn::Module {
  // Initialised as transformers does: normal(0, deviation), biases zero, norms one. Throws std::invalid_argument.
  explicit LlamaImpl(LlamaConfig config);

  // tokens: int64 [batch, time], time <= sequence. mask: [batch, time], 0 for padding, or [batch, time, time], true
  // where a token may see another one that is not later, as in packed samples; undefined: no padding. Returns logits
  // [batch, time, vocabulary] in the parameters' dtype; those of padding are without meaning. Throws c10::Error for
  // other shapes.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& mask = {});
  // Mean negative log likelihood in nats of targets, int64 [batch, time], a scalar in fp32. Targets of -100 do not
  // count. A target belongs to the logits at its own place: it is the token after that of the same place in `tokens`.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets, const at::Tensor& mask = {});

  // The two halves of forward(): the last norm's result, [batch, time, hidden], and logits of any rows of it.
  at::Tensor features(const at::Tensor& tokens, const at::Tensor& mask = {});
  at::Tensor head(const at::Tensor& features);
  // Logits [batch, vocabulary] after the newest tokens [batch, new], as models/decoding.h describes.
  at::Tensor next(const at::Tensor& tokens, DecoderState& state);
  // tokens: int64 [batch, time >= 1]; mask: [batch, time], 0 where a row is padded on its left. Returns the tokens
  // followed by `count` generated ones, or fewer if all rows end. Throws std::invalid_argument if `sequence` cannot
  // hold them.
  at::Tensor generate(const at::Tensor& tokens, std::int64_t count, const Sampling& sampling,
                      const at::Tensor& mask = {});

  // Layers in segments: see Segments.
  void run_layers_by(std::int64_t count, Runner runner) { segments_.run_by(count, std::move(runner)); }
  const LlamaConfig& config() const { return config_; }

 private:
  Rotary rotary(const at::Tensor& positions, const at::Tensor& like) const;
  LlamaConfig config_;
  Segments segments_;
  torch::nn::Embedding token_{nullptr};
  torch::nn::ModuleList layers_{nullptr};
  RmsNorm norm_{nullptr};
  Linear output_{nullptr};
};
TORCH_MODULE(Llama);

}  // namespace models
