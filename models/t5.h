// T5 for conditional generation (Raffel et al., 1910.10683): an encoder and a decoder with RMSNorm before each part,
// relative positions that all layers of a stack share, and attention without scaling; v1.0 with ReLU, v1.1 with gated
// GELU. Parameters have the names, shapes and ties of transformers' T5ForConditionalGeneration, so its weights need no
// name map. Plain torch::nn. Parameters may have any floating dtype, which activations share; norms and the loss are
// computed in fp32.
#pragma once
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "models/decoding.h"
#include "models/generation.h"
#include "models/layers.h"
#include "models/model_configs.h"

namespace models {

// Keys and values of the encoder's result for one layer of the decoder.
struct T5Memory {
  at::Tensor k, v;
};

struct T5BlockImpl : torch::nn::Module {
  // first: has the relative positions of its stack.
  T5BlockImpl(const T5Config& config, bool decoder, bool first);
  // x: [batch, time, hidden]. own, seen: what may be attended to of x and of `memory`, which only decoders have. kept:
  // as in LlamaLayerImpl.
  at::Tensor forward(const at::Tensor& x, const Visible& own, const T5Memory& memory, const Visible& seen,
                     KeyValues* kept = nullptr);
  // Of the encoder's result, [batch, time, hidden].
  T5Memory remember(const at::Tensor& encoded);
  // Scores that are added for the last `queries` of `keys` places: [1, heads, queries, keys]. Of the first block.
  at::Tensor positions(std::int64_t queries, std::int64_t keys);

 private:
  struct Attention {
    Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr};
    RmsNorm norm{nullptr};
  };
  Attention attention(torch::nn::Module& layer, const char* name);
  at::Tensor dropped(const at::Tensor& x) const { return torch::dropout(x, config_.dropout, is_training()); }

  T5Config config_;
  bool decoder_;
  Attention own_, cross_;
  torch::nn::Embedding positions_{nullptr};
  Linear up_{nullptr}, gate_{nullptr}, down_{nullptr};
  RmsNorm norm_{nullptr};
};
TORCH_MODULE(T5Block);

struct T5StackImpl : torch::nn::Module {
  T5StackImpl(const T5Config& config, bool decoder, const at::Tensor& shared);
  // tokens: int64 [batch, time]; mask: as in Llama. memory, seen: of a decoder. Returns [batch, time, hidden].
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& mask, const at::Tensor& encoded = {},
                     const Visible& seen = {});
  T5Block block(std::int64_t i) { return T5Block(blocks_->ptr<T5BlockImpl>(static_cast<std::size_t>(i))); }
  // Relative positions and mask of the last `queries` of `keys` tokens.
  Visible visible_of(const at::Tensor& mask, std::int64_t queries, std::int64_t keys, const at::Tensor& like);
  at::Tensor embed(const at::Tensor& tokens);
  at::Tensor finish(const at::Tensor& x);
  Segments segments;

 private:
  T5Config config_;
  bool decoder_;
  torch::nn::Embedding token_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  RmsNorm norm_{nullptr};
};
TORCH_MODULE(T5Stack);

// What the decoder keeps between the steps of a generation.
struct T5State {
  DecoderState decoder;
  std::vector<T5Memory> memory;  // of each layer
  Visible seen;
};

struct T5ForConditionalGenerationImpl : torch::nn::Module {
  // Initialised as transformers does. Throws std::invalid_argument.
  explicit T5ForConditionalGenerationImpl(T5Config config);

  // tokens: int64 [batch, time]; decoder_tokens: int64 [batch, its time]. mask: [batch, time]; decoder_mask: as in
  // Llama; undefined: no padding. Returns logits [batch, decoder's time, vocabulary] in the parameters' dtype.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& decoder_tokens, const at::Tensor& mask = {},
                     const at::Tensor& decoder_mask = {});
  // Mean negative log likelihood in nats of targets, int64 [batch, its time], a scalar in fp32; -100 does not count.
  // The decoder reads shift_right(targets).
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets, const at::Tensor& mask = {});
  // The start token, and all targets but the last; -100 becomes padding.
  at::Tensor shift_right(const at::Tensor& targets) const;

  // Encodes for next(): the newest decoder tokens, [batch, new], give logits [batch, vocabulary] of what follows.
  T5State encode(const at::Tensor& tokens, const at::Tensor& mask = {});
  at::Tensor next(const at::Tensor& decoder_tokens, T5State& state);
  // The start token and at most `count` tokens of the decoder, [batch, 1 + count], or fewer if all rows end.
  at::Tensor generate(const at::Tensor& tokens, std::int64_t count, const Sampling& sampling,
                      const at::Tensor& mask = {});

  // The blocks of encoder and decoder in `count` segments each: see Segments.
  void run_layers_by(std::int64_t count, const Runner& runner);
  const T5Config& config() const { return config_; }

 private:
  at::Tensor head(const at::Tensor& features);
  T5Config config_;
  torch::nn::Embedding shared_{nullptr};
  T5Stack encoder_{nullptr}, decoder_{nullptr};
  Linear output_{nullptr};
};
TORCH_MODULE(T5ForConditionalGeneration);

}  // namespace models
