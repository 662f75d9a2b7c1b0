// Forward pass, initialisation and sampling of GPT (gpt.h). Attention is libtorch's fused kernel on CPU and GPU. Dtype
// and device are those of the parameters.
#include "models/gpt.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace models {
namespace {

template <class Linear>
void initialise(Linear& linear, double deviation) {
  torch::NoGradGuard no_grad;
  linear->weight.normal_(0, deviation);
  if (linear->bias.defined()) linear->bias.zero_();
}

void initialise(torch::nn::Embedding& embedding, double deviation) {
  torch::NoGradGuard no_grad;
  embedding->weight.normal_(0, deviation);
}

// Of projections into the residual stream.
double residual_deviation(const GptConfig& config) {
  return config.deviation / std::sqrt(2.0 * static_cast<double>(config.layers));
}

at::Tensor mlp_of(AdaptableLinear& up, AdaptableLinear& down, const at::Tensor& x) {
  return down(torch::gelu(up(x), "tanh"));
}

// A sum of which either part may be undefined.
at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) { return !a.defined() ? b : !b.defined() ? a : a + b; }

}  // namespace

GptMlpImpl::GptMlpImpl(const GptConfig& config) {
  up_ = register_module("up", AdaptableLinear(config.hidden, 4 * config.hidden));
  down_ = register_module("down", AdaptableLinear(4 * config.hidden, config.hidden));
  initialise(up_, config.deviation);
  initialise(down_, residual_deviation(config));
}

at::Tensor GptMlpImpl::forward(const at::Tensor& x) { return mlp_of(up_, down_, x); }

GptBlockImpl::GptBlockImpl(const GptConfig& config, std::int64_t layer)
    : heads_(config.heads), dropout_(config.dropout) {
  const std::int64_t hidden = config.hidden;
  norm1_ = register_module("norm1", make_layer_norm(hidden));
  qkv_ = register_module("qkv", AdaptableLinear(hidden, 3 * hidden));
  projection_ = register_module("projection", AdaptableLinear(hidden, hidden));
  norm2_ = register_module("norm2", make_layer_norm(hidden));
  if (config.mlp) mlp_ = config.mlp(config, layer);
  if (mlp_.is_empty()) {
    up_ = register_module("up", AdaptableLinear(hidden, 4 * hidden));
    down_ = register_module("down", AdaptableLinear(4 * hidden, hidden));
  } else {
    register_module("mlp", mlp_.ptr());
  }
  initialise(qkv_, config.deviation);
  initialise(projection_, residual_deviation(config));
  if (!mlp_.is_empty()) return;
  initialise(up_, config.deviation);
  initialise(down_, residual_deviation(config));
}

std::pair<at::Tensor, at::Tensor> GptBlockImpl::forward(const at::Tensor& x) { return forward(x, attend_); }

at::Tensor GptBlockImpl::forward(const at::Tensor& x, const Visible& visible, KeyValues& kept) {
  return forward(x,
                 [&](const Attention&, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
                   const auto all = kept.append(k, v);
                   return attend(q, all.first, all.second, visible, 0);
                 })
      .first;
}

std::pair<at::Tensor, at::Tensor> GptBlockImpl::forward(const at::Tensor& x, const Attend& attend) {
  const std::int64_t batch = x.size(0), time = x.size(1), width = x.size(2) / heads_;
  // With tensor parallelism, qkv gives some of the heads only.
  const auto parts = qkv_(norm1_(x)).view({batch, time, 3, -1, width}).permute({2, 0, 3, 1, 4}).unbind(0);
  const double dropout = is_training() ? dropout_ : 0;
  const Attention local = [dropout](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return at::scaled_dot_product_attention(q, k, v, {}, dropout, /*is_causal=*/true);
  };
  at::Tensor mixed = attend ? attend(local, parts[0], parts[1], parts[2]) : local(parts[0], parts[1], parts[2]);
  mixed = projection_(mixed.transpose(1, 2).reshape({batch, time, -1}));
  const at::Tensor y = x + torch::dropout(mixed, dropout_, is_training());
  at::Tensor mlp, aux;
  if (mlp_.is_empty())
    mlp = mlp_of(up_, down_, norm2_(y));
  else
    std::tie(mlp, aux, std::ignore) =
        mlp_.forward<std::tuple<at::Tensor, at::Tensor, at::Tensor>>(norm2_(y), at::Tensor());
  return {y + torch::dropout(mlp, dropout_, is_training()), aux};
}

GptImpl::GptImpl(GptConfig config) : config_(std::move(config)) {
  config_.validate();
  token_ = register_module("token", torch::nn::Embedding(config_.vocabulary, config_.hidden));
  position_ = register_module("position", torch::nn::Embedding(config_.sequence, config_.hidden));
  initialise(token_, config_.deviation);
  initialise(position_, config_.deviation);
  blocks_ = register_module("blocks", torch::nn::ModuleList());
  for (std::int64_t layer = 0; layer < config_.layers; ++layer) blocks_->push_back(GptBlock(config_, layer));
  norm_ = register_module("norm", make_layer_norm(config_.hidden));
  if (!config_.tied_output) {
    const auto options = torch::nn::LinearOptions(config_.hidden, config_.vocabulary).bias(false);
    output_ = register_module("output", torch::nn::Linear(options));
    initialise(output_, config_.deviation);
  }
}

void GptImpl::run_layers_by(std::int64_t count, Runner runner) {
  if (count < 1)
    throw std::invalid_argument("[Gpt::run_layers_by] got count " + std::to_string(count) + ", expected at least 1");
  parts_ = std::min(count, config_.layers);
  runner_ = std::move(runner);
}

void GptImpl::attend_by(const GptBlockImpl::Attend& attend) {
  attends_elsewhere_ = attend != nullptr;
  for (const auto& block : *blocks_) block->as<GptBlockImpl>()->attend_by(attend);
}

GptBlockImpl& GptImpl::block(std::int64_t layer) {
  return *blocks_[static_cast<std::size_t>(layer)]->as<GptBlockImpl>();
}

std::pair<at::Tensor, at::Tensor> GptImpl::layers(std::int64_t begin, std::int64_t end, at::Tensor x) {
  at::Tensor sum;
  for (std::int64_t layer = begin; layer < end; ++layer) {
    at::Tensor aux;
    std::tie(x, aux) = block(layer).forward(x);
    sum = sum_of(sum, aux);
  }
  return {x, sum};
}

at::Tensor GptImpl::features(const at::Tensor& tokens) {
  TORCH_CHECK(tokens.dim() == 2 && tokens.size(1) >= 1 && first_position_ + tokens.size(1) <= config_.sequence,
              "[Gpt::forward] got tokens ", tokens.sizes(), " from position ", first_position_,
              ", expected [batch, time] with positions up to ", config_.sequence);
  at::Tensor x = token_(tokens) + position_->weight.narrow(0, first_position_, tokens.size(1));
  x = torch::dropout(x, config_.dropout, is_training());
  aux_loss_ = at::Tensor();
  if (!runner_) {
    std::tie(x, aux_loss_) = layers(0, config_.layers, x);
    return norm_(x);
  }
  for (std::int64_t part = 0; part < parts_; ++part) {
    const std::int64_t begin = part * config_.layers / parts_, end = (part + 1) * config_.layers / parts_;
    at::Tensor aux;
    std::tie(x, aux) = runner_([this, begin, end](const at::Tensor& y) { return layers(begin, end, y); }, x);
    aux_loss_ = sum_of(aux_loss_, aux);
  }
  return norm_(x);
}

at::Tensor GptImpl::logits(const at::Tensor& features) {
  return output_.is_empty() ? torch::linear(features, token_->weight) : output_(features);
}

at::Tensor GptImpl::forward(const at::Tensor& tokens) { return logits(features(tokens)); }

at::Tensor GptImpl::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  check_targets("Gpt::forward", tokens, targets);
  return cross_entropy(forward(tokens).flatten(0, 1), targets.flatten());
}

at::Tensor GptImpl::next(const at::Tensor& tokens, DecoderState& state) {
  state.begin(config_.layers, tokens, "Gpt::next", config_.sequence);
  at::Tensor x = token_(tokens) + position_(state.positions(tokens));
  const Visible seen = visible(state.mask(), tokens.size(1), state.length() + tokens.size(1), /*causal=*/true, x);
  for (std::int64_t layer = 0; layer < config_.layers; ++layer) x = block(layer).forward(x, seen, state.layer(layer));
  state.end(tokens.size(1));
  return logits(norm_(x.select(1, -1)));
}

at::Tensor GptImpl::generate(const at::Tensor& tokens, std::int64_t count, const Sampling& sampling,
                             const at::Tensor& mask) {
  if (mask.defined() && (attends_elsewhere_ || tokens.size(1) + count > config_.sequence))
    throw std::invalid_argument("[Gpt::generate] got padded prompts of " + std::to_string(tokens.size(1)) +
                                " tokens and count " + std::to_string(count) + ", expected at most " +
                                std::to_string(config_.sequence) + " tokens, all on one rank");
  DecoderState state(mask);
  at::Tensor all;
  const auto next = [&](const at::Tensor& newest) {
    all = all.defined() ? torch::cat({all, newest}, 1) : newest;
    if (!attends_elsewhere_ && all.size(1) <= config_.sequence) return this->next(newest, state);
    const std::int64_t seen = std::min(all.size(1), config_.sequence);
    return logits(features(all.narrow(1, all.size(1) - seen, seen)).select(1, seen - 1));
  };
  return generate_by(*this, next, tokens, count, sampling);
}

}  // namespace models
