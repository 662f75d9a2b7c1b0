// See bert.h.
#include "models/bert.h"

#include <utility>

#include "models/cross_entropy.h"

namespace models {
namespace {

void check_row_targets(const char* where, const BertInput& input, const at::Tensor& targets) {
  TORCH_CHECK(targets.dim() == 1 && targets.size(0) == input.tokens.size(0), "[", where, "] got targets ",
              targets.sizes(), ", expected [", input.tokens.size(0), "]");
}

}  // namespace

BertLayerImpl::BertLayerImpl(const BertConfig& config)
    : heads_(config.heads),
      dropout_(config.dropout),
      attention_dropout_(config.attention_dropout),
      activation_(config.activation) {
  const auto dense = [&](std::int64_t in, std::int64_t out) { return Linear(in, out, true, config.deviation); };
  const auto norm = [&] { return make_layer_norm(config.hidden, config.norm_epsilon); };
  const auto attention = make_path(*this, "attention");
  const auto self = make_path(*attention, "self");
  query_ = self->register_module("query", dense(config.hidden, config.hidden));
  key_ = self->register_module("key", dense(config.hidden, config.hidden));
  value_ = self->register_module("value", dense(config.hidden, config.hidden));
  const auto mixed = make_path(*attention, "output");
  mixed_ = mixed->register_module("dense", dense(config.hidden, config.hidden));
  mixed_norm_ = mixed->register_module("LayerNorm", norm());
  up_ = make_path(*this, "intermediate")->register_module("dense", dense(config.hidden, config.inner));
  const auto output = make_path(*this, "output");
  down_ = output->register_module("dense", dense(config.inner, config.hidden));
  norm_ = output->register_module("LayerNorm", norm());
}

at::Tensor BertLayerImpl::forward(const at::Tensor& x, const Visible& visible) {
  const auto heads = [this](Linear& linear, const at::Tensor& y) { return split_heads(linear(y), heads_); };
  const at::Tensor mixed =
      attend(heads(query_, x), heads(key_, x), heads(value_, x), visible, is_training() ? attention_dropout_ : 0);
  const at::Tensor y = mixed_norm_(torch::dropout(mixed_(merge_heads(mixed)), dropout_, is_training()) + x);
  return norm_(torch::dropout(down_(activate(activation_, up_(y))), dropout_, is_training()) + y);
}

BertModelImpl::BertModelImpl(BertConfig config, bool pooled) : config_(std::move(config)) {
  config_.validate();
  const auto embedding = [&](std::int64_t rows, std::int64_t padding) {
    return make_embedding(rows, config_.hidden, config_.deviation, padding);
  };
  const auto embeddings = make_path(*this, "embeddings");
  words_ = embeddings->register_module("word_embeddings", embedding(config_.vocabulary, config_.pad_token));
  positions_ = embeddings->register_module("position_embeddings", embedding(config_.sequence, -1));
  types_ = embeddings->register_module("token_type_embeddings", embedding(config_.token_types, -1));
  norm_ = embeddings->register_module("LayerNorm", make_layer_norm(config_.hidden, config_.norm_epsilon));
  layers_ = make_path(*this, "encoder")->register_module("layer", torch::nn::ModuleList());
  for (std::int64_t i = 0; i < config_.layers; ++i) layers_->push_back(BertLayer(config_));
  if (pooled)
    pooler_ = make_path(*this, "pooler")
                  ->register_module("dense", Linear(config_.hidden, config_.hidden, true, config_.deviation));
}

at::Tensor BertModelImpl::forward(const BertInput& input) {
  check_tokens("Bert::forward", input.tokens, config_.sequence);
  const std::int64_t time = input.tokens.size(1);
  const at::Tensor types = input.types.defined() ? input.types.to(torch::kLong) : torch::zeros_like(input.tokens);
  TORCH_CHECK(types.sizes() == input.tokens.sizes(), "[Bert::forward] got token types ", types.sizes(), ", expected ",
              input.tokens.sizes());
  at::Tensor x = words_(input.tokens) + types_(types) + positions_->weight.narrow(0, 0, time);
  x = torch::dropout(norm_(x), config_.dropout, is_training());
  const Visible seen = visible(input.mask, time, time, /*causal=*/false, x);
  return segments_.run(config_.layers, x, [this, seen](std::int64_t i, const at::Tensor& y) {
    return layers_[static_cast<std::size_t>(i)]->as<BertLayerImpl>()->forward(y, seen);
  });
}

at::Tensor BertModelImpl::pool(const at::Tensor& encoded) { return torch::tanh(pooler_(encoded.select(1, 0))); }

BertForMaskedLMImpl::BertForMaskedLMImpl(BertConfig config) : activation_(config.activation) {
  bert = register_module("bert", BertModel(config, /*pooled=*/false));
  const auto head = make_path(*make_path(*this, "cls"), "predictions");
  const at::Tensor bias = head->register_parameter("bias", torch::zeros({config.vocabulary}));
  const auto transform = make_path(*head, "transform");
  transform_ = transform->register_module("dense", Linear(config.hidden, config.hidden, true, config.deviation));
  norm_ = transform->register_module("LayerNorm", make_layer_norm(config.hidden, config.norm_epsilon));
  // Without ties transformers has two biases, of which it reads the decoder's.
  decoder_ = head->register_module("decoder", config.tied_output
                                                  ? Linear(bert->words()->weight, bias)
                                                  : Linear(config.hidden, config.vocabulary, true, config.deviation));
}

at::Tensor BertForMaskedLMImpl::head(const at::Tensor& rows) {
  return decoder_(norm_(activate(activation_, transform_(rows))));
}

at::Tensor BertForMaskedLMImpl::forward(const BertInput& input) { return head(bert(input)); }

at::Tensor BertForMaskedLMImpl::loss(const BertInput& input, const at::Tensor& targets) {
  check_targets("BertForMaskedLM::loss", input.tokens, targets);
  const at::Tensor flat = targets.flatten();
  at::Tensor places = flat.ne(kIgnored).nonzero().squeeze(1);
  if (places.numel() == 0) places = torch::zeros({1}, places.options());  // its target counts as nothing
  return cross_entropy(head(bert(input).flatten(0, 1).index_select(0, places)), flat.index_select(0, places));
}

BertForSequenceClassificationImpl::BertForSequenceClassificationImpl(BertConfig config) {
  bert = register_module("bert", BertModel(config, /*pooled=*/true));
  classifier_ = register_module("classifier", Linear(config.hidden, config.labels, true, config.deviation));
}

at::Tensor BertForSequenceClassificationImpl::forward(const BertInput& input) {
  const BertConfig& config = bert->config();
  const double dropout = config.classifier_dropout < 0 ? config.dropout : config.classifier_dropout;
  return classifier_(torch::dropout(bert->pool(bert(input)), dropout, is_training()));
}

at::Tensor BertForSequenceClassificationImpl::loss(const BertInput& input, const at::Tensor& targets) {
  check_row_targets("BertForSequenceClassification::loss", input, targets);
  return loss_of(forward(input), targets);
}

at::Tensor BertForSequenceClassificationImpl::loss_of(const at::Tensor& logits, const at::Tensor& targets) {
  return cross_entropy(logits, targets);
}

BertForQuestionAnsweringImpl::BertForQuestionAnsweringImpl(BertConfig config) {
  bert = register_module("bert", BertModel(config, /*pooled=*/false));
  outputs_ = register_module("qa_outputs", Linear(config.hidden, 2, true, config.deviation));
}

std::pair<at::Tensor, at::Tensor> BertForQuestionAnsweringImpl::forward(const BertInput& input) {
  const at::Tensor both = outputs_(bert(input));
  return {both.select(-1, 0).contiguous(), both.select(-1, 1).contiguous()};
}

at::Tensor BertForQuestionAnsweringImpl::loss(const BertInput& input, const at::Tensor& first, const at::Tensor& last) {
  check_row_targets("BertForQuestionAnswering::loss", input, first);
  check_row_targets("BertForQuestionAnswering::loss", input, last);
  return loss_of(forward(input), first, last);
}

at::Tensor BertForQuestionAnsweringImpl::loss_of(const std::pair<at::Tensor, at::Tensor>& logits,
                                                 const at::Tensor& first, const at::Tensor& last) {
  const auto loss = [](const at::Tensor& of, const at::Tensor& places) {
    // Places before the sample count as its first, as transformers clamps them.
    const at::Tensor clamped = places.clamp_min(0);
    return cross_entropy(of, clamped.masked_fill(clamped.ge(of.size(1)), kIgnored));
  };
  return (loss(logits.first, first) + loss(logits.second, last)) / 2;
}

}  // namespace models
