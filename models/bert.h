// BERT (Devlin et al., 1810.04805): a bidirectional encoder with norms after each residual sum, and its heads for
// masked language modelling, sequence classification and question answering. Parameters have the names, shapes and ties
// of transformers' classes of the same names, so their weights need no name map. Plain torch::nn. Parameters may have
// any floating dtype, which activations share; losses are computed in fp32.
#pragma once
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <utility>

#include "models/layers.h"
#include "models/model_configs.h"

namespace models {

// What every head reads. mask: [batch, time], 0 for padding; undefined: no padding. types: int64 [batch, time], the
// segment of each token; undefined: 0. mask and types may be of any integer dtype or bool.
struct BertInput {
  at::Tensor tokens;  // int64 [batch, time], time <= sequence
  at::Tensor mask = {}, types = {};
};

struct BertLayerImpl : torch::nn::Module {
  explicit BertLayerImpl(const BertConfig& config);
  at::Tensor forward(const at::Tensor& x, const Visible& visible);

 private:
  std::int64_t heads_;
  double dropout_, attention_dropout_;
  Activation activation_;
  Linear query_{nullptr}, key_{nullptr}, value_{nullptr}, mixed_{nullptr}, up_{nullptr}, down_{nullptr};
  LayerNorm mixed_norm_{nullptr}, norm_{nullptr};
};
TORCH_MODULE(BertLayer);

// The encoder, with the pooler where `pooled`.
struct BertModelImpl : torch::nn::Module {
  BertModelImpl(BertConfig config, bool pooled);
  // [batch, time, hidden]; values of padding are without meaning. Throws c10::Error for other shapes.
  at::Tensor forward(const BertInput& input);
  // tanh of a linear layer of the first token's: [batch, hidden].
  at::Tensor pool(const at::Tensor& encoded);
  // Layers in segments: see Segments.
  void run_layers_by(std::int64_t count, Runner runner) { segments_.run_by(count, std::move(runner)); }
  const BertConfig& config() const { return config_; }
  const torch::nn::Embedding& words() const { return words_; }

 private:
  BertConfig config_;
  Segments segments_;
  torch::nn::Embedding words_{nullptr}, positions_{nullptr}, types_{nullptr};
  LayerNorm norm_{nullptr};
  torch::nn::ModuleList layers_{nullptr};
  Linear pooler_{nullptr};
};
TORCH_MODULE(BertModel);

struct BertForMaskedLMImpl : torch::nn::Module {
  // Initialised as transformers does: normal(0, deviation), biases zero. Throws std::invalid_argument.
  explicit BertForMaskedLMImpl(BertConfig config);
  // Logits [batch, time, vocabulary] in the parameters' dtype.
  at::Tensor forward(const BertInput& input);
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& mask = {}, const at::Tensor& types = {}) {
    return forward(BertInput{tokens, mask, types});
  }
  // Mean negative log likelihood in nats of the tokens that were masked: targets, int64 [batch, time], are the tokens
  // there and -100 elsewhere. The vocabulary's logits are computed for these places only. A scalar in fp32.
  at::Tensor loss(const BertInput& input, const at::Tensor& targets);
  // Logits [n, vocabulary] of rows [n, hidden] of the encoder's result.
  at::Tensor head(const at::Tensor& rows);
  BertModel bert{nullptr};

 private:
  Activation activation_;
  Linear transform_{nullptr}, decoder_{nullptr};
  LayerNorm norm_{nullptr};
};
TORCH_MODULE(BertForMaskedLM);

struct BertForSequenceClassificationImpl : torch::nn::Module {
  explicit BertForSequenceClassificationImpl(BertConfig config);
  // Logits [batch, labels].
  at::Tensor forward(const BertInput& input);
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& mask = {}, const at::Tensor& types = {}) {
    return forward(BertInput{tokens, mask, types});
  }
  // targets: int64 [batch], classes; -100 does not count. The mean negative log likelihood, a scalar in fp32.
  at::Tensor loss(const BertInput& input, const at::Tensor& targets);
  // The same of forward()'s result.
  static at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& targets);
  BertModel bert{nullptr};

 private:
  Linear classifier_{nullptr};
};
TORCH_MODULE(BertForSequenceClassification);

struct BertForQuestionAnsweringImpl : torch::nn::Module {
  explicit BertForQuestionAnsweringImpl(BertConfig config);  // `labels` is not used
  // Logits of the first and of the last token of the answer, [batch, time] each.
  std::pair<at::Tensor, at::Tensor> forward(const BertInput& input);
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& tokens, const at::Tensor& mask = {},
                                            const at::Tensor& types = {}) {
    return forward(BertInput{tokens, mask, types});
  }
  // first, last: int64 [batch], places in the sample; places outside of it do not count, as in transformers. The mean
  // of both negative log likelihoods, a scalar in fp32.
  at::Tensor loss(const BertInput& input, const at::Tensor& first, const at::Tensor& last);
  // The same of forward()'s result.
  static at::Tensor loss_of(const std::pair<at::Tensor, at::Tensor>& logits, const at::Tensor& first,
                            const at::Tensor& last);
  BertModel bert{nullptr};

 private:
  Linear outputs_{nullptr};
};
TORCH_MODULE(BertForQuestionAnswering);

}  // namespace models
