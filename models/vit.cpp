// See vit.h.
#include "models/vit.h"

#include <utility>

#include "models/cross_entropy.h"

namespace models {

VitLayerImpl::VitLayerImpl(const VitConfig& config)
    : heads_(config.heads),
      dropout_(config.dropout),
      attention_dropout_(config.attention_dropout),
      activation_(config.activation) {
  const std::int64_t hidden = config.hidden;
  const auto attention = make_path(*this, "attention");
  const auto linear = [&](std::int64_t in, std::int64_t out, bool bias) {
    return Linear(in, out, bias, config.deviation);
  };
  q_ = attention->register_module("q_proj", linear(hidden, hidden, config.qkv_bias));
  k_ = attention->register_module("k_proj", linear(hidden, hidden, config.qkv_bias));
  v_ = attention->register_module("v_proj", linear(hidden, hidden, config.qkv_bias));
  o_ = attention->register_module("o_proj", linear(hidden, hidden, true));
  before_ = register_module("layernorm_before", make_layer_norm(hidden, config.norm_epsilon));
  after_ = register_module("layernorm_after", make_layer_norm(hidden, config.norm_epsilon));
  const auto mlp = make_path(*this, "mlp");
  up_ = mlp->register_module("fc1", linear(hidden, config.inner, true));
  down_ = mlp->register_module("fc2", linear(config.inner, hidden, true));
}

at::Tensor VitLayerImpl::forward(const at::Tensor& x) {
  const at::Tensor norm = before_(x);
  const at::Tensor mixed = attend(split_heads(q_(norm), heads_), split_heads(k_(norm), heads_),
                                  split_heads(v_(norm), heads_), {}, is_training() ? attention_dropout_ : 0);
  const at::Tensor y = torch::dropout(o_(merge_heads(mixed)), dropout_, is_training()) + x;
  return torch::dropout(down_(activate(activation_, up_(after_(y)))), dropout_, is_training()) + y;
}

VitForImageClassificationImpl::VitForImageClassificationImpl(VitConfig config) : config_(std::move(config)) {
  config_.validate();
  const auto& c = config_;
  const auto vit = make_path(*this, "vit");
  const auto embeddings = make_path(*vit, "embeddings");
  // transformers draws these two from a normal distribution cut at 2, which is 100 deviations away.
  first_ = embeddings->register_parameter("cls_token", drawn({1, 1, c.hidden}, c.deviation));
  positions_ =
      embeddings->register_parameter("position_embeddings", drawn({1, c.patches() + 1, c.hidden}, c.deviation));
  const auto projection = make_path(*make_path(*embeddings, "patch_embeddings"), "projection");
  patches_ = projection->register_parameter("weight", drawn({c.hidden, c.channels, c.patch, c.patch}, c.deviation));
  patches_bias_ = projection->register_parameter("bias", torch::zeros({c.hidden}));
  layers_ = vit->register_module("layers", torch::nn::ModuleList());
  for (std::int64_t i = 0; i < c.layers; ++i) layers_->push_back(VitLayer(c));
  norm_ = vit->register_module("layernorm", make_layer_norm(c.hidden, c.norm_epsilon));
  classifier_ = register_module("classifier", Linear(c.hidden, c.labels, true, c.deviation));
}

at::Tensor VitForImageClassificationImpl::forward(const at::Tensor& pixels) {
  TORCH_CHECK(pixels.dim() == 4 && pixels.size(1) == config_.channels && pixels.size(2) == config_.image &&
                  pixels.size(3) == config_.image,
              "[Vit::forward] got pixels ", pixels.sizes(), ", expected [batch, ", config_.channels, ", ",
              config_.image, ", ", config_.image, "]");
  const at::Tensor patches = at::conv2d(pixels.to(patches_.scalar_type()), patches_, patches_bias_, config_.patch);
  at::Tensor x = torch::cat({first_.expand({pixels.size(0), -1, -1}), patches.flatten(2).transpose(1, 2)}, 1);
  x = torch::dropout(x + positions_, config_.dropout, is_training());
  x = segments_.run(config_.layers, x, [this](std::int64_t i, const at::Tensor& y) {
    return layers_[static_cast<std::size_t>(i)]->as<VitLayerImpl>()->forward(y);
  });
  return classifier_(norm_(x.select(1, 0)));
}

at::Tensor VitForImageClassificationImpl::loss(const at::Tensor& pixels, const at::Tensor& targets) {
  return cross_entropy(forward(pixels), targets);
}

}  // namespace models
