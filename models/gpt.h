// GPT: a decoder-only transformer with pre-norm blocks and learned positions, as in GPT-2 (Radford
// et al., 2019). Plain torch::nn code without ranks or shards. Parameters may have any floating dtype; activations
// have the same dtype, and the loss is computed in fp32.
#pragma once
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models/adaptable.h"
#include "models/cross_entropy.h"
#include "models/decoding.h"
#include "models/generation.h"
#include "models/gpt_config.h"
#include "models/layers.h"

namespace models {

// The MLP of a layer on its own, as an expert of a mixture. x: [.., hidden], also without rows.
struct GptMlpImpl : torch::nn::Module {
  explicit GptMlpImpl(const GptConfig& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  AdaptableLinear up_{nullptr}, down_{nullptr};
};
TORCH_MODULE(GptMlp);

// One layer: x + attention(norm(x)), then x + mlp(norm(x)). x: [batch, time, hidden].
struct GptBlockImpl : torch::nn::Module {
  explicit GptBlockImpl(const GptConfig& config, std::int64_t layer = 0);
  // Returns x and the auxiliary loss of GptConfig::mlp, undefined without it.
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x);
  // The same for the newest time steps, which see what is in `kept` too.
  at::Tensor forward(const at::Tensor& x, const Visible& visible, KeyValues& kept);

  // Causal attention. q, k, v and the result: [batch, heads, time, head width].
  using Attention = std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>;
  // Calls `local`, which computes attention over all time steps that it is given.
  using Attend =
      std::function<at::Tensor(const Attention& local, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>;
  void attend_by(Attend attend) { attend_ = std::move(attend); }

 private:
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const Attend& attend);
  std::int64_t heads_;
  double dropout_;
  Attend attend_;  // null: attention over the block's input
  LayerNorm norm1_{nullptr}, norm2_{nullptr};
  AdaptableLinear qkv_{nullptr}, projection_{nullptr}, up_{nullptr}, down_{nullptr};
  torch::nn::AnyModule mlp_;  // in place of up_ and down_; empty: none
};
TORCH_MODULE(GptBlock);

struct GptImpl : torch::nn::Module {
  // Initialised as GPT-2: normal(0, 0.02), projections into the residual stream divided by
  // sqrt(2 * layers), biases zero.
  explicit GptImpl(GptConfig config);

  // tokens: int64 [batch, time], time <= sequence. Returns logits [batch, time, vocabulary] in the
  // parameters' dtype. Throws c10::Error for other shapes.
  at::Tensor forward(const at::Tensor& tokens);
  // targets: int64 [batch, time]. Returns the mean negative log likelihood in nats, a scalar in fp32.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets);
  // The sum of the layers' auxiliary losses in the last forward, to be added to the loss; a scalar in fp32. Undefined
  // without GptConfig::mlp, and when called again.
  at::Tensor take_aux_loss() { return std::exchange(aux_loss_, at::Tensor()); }
  // tokens: int64 [batch, time >= 1]. Returns them followed by `count` generated tokens, [batch, time +
  // count], or fewer if all rows end; the model sees the last `sequence` of them. mask: [batch, time], 0 where a row is
  // padded on its left; then all tokens must fit into `sequence`. Without gradients, in evaluation mode. Keys and
  // values are kept while the tokens fit; beyond, and with attend_by(), every step computes all of them.
  at::Tensor generate(const at::Tensor& tokens, std::int64_t count, const Sampling& sampling,
                      const at::Tensor& mask = {});
  // Logits [batch, vocabulary] after the newest tokens [batch, new], as models/decoding.h describes.
  at::Tensor next(const at::Tensor& tokens, DecoderState& state);

  // Splits the layers into `count` segments of nearly equal length, at most one per layer. From now on forward() passes
  // each segment to `runner`, which returns part(x) and may call `part` again in backward; this is the hook for
  // activation checkpointing. x and the first result: [batch, time, hidden]; the second one: the sum of the segment's
  // auxiliary losses, or undefined. count >= 1.
  using Part = std::function<std::pair<at::Tensor, at::Tensor>(const at::Tensor& x)>;
  using Runner = std::function<std::pair<at::Tensor, at::Tensor>(const Part& part, const at::Tensor& x)>;
  void run_layers_by(std::int64_t count, Runner runner);

  // For models that see a part of each sequence only. attend_by: attention is computed by `attend`, which can exchange
  // time steps for heads with other ranks; null: as usual. first_position: of the tokens that forward() gets.
  void attend_by(const GptBlockImpl::Attend& attend);
  void first_position(std::int64_t position) { first_position_ = position; }

  const GptConfig& config() const { return config_; }

 private:
  GptBlockImpl& block(std::int64_t layer);
  at::Tensor features(const at::Tensor& tokens);
  at::Tensor logits(const at::Tensor& features);
  std::pair<at::Tensor, at::Tensor> layers(std::int64_t begin, std::int64_t end, at::Tensor x);
  GptConfig config_;
  std::int64_t parts_ = 1, first_position_ = 0;
  bool attends_elsewhere_ = false;  // attend_by()
  Runner runner_;                   // null: the layers run as they are
  at::Tensor aux_loss_;             // of the last forward
  torch::nn::Embedding token_{nullptr}, position_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  LayerNorm norm_{nullptr};
  torch::nn::Linear output_{nullptr};  // null when tied
};
TORCH_MODULE(Gpt);

}  // namespace models
