// See layers.h.
#include "models/layers.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numbers>
#include <stdexcept>
#include <string>

#include "models/fused.h"

namespace models {
at::Tensor drawn(at::IntArrayRef sizes, double deviation) {
  const torch::NoGradGuard no_grad;
  return at::empty(sizes, torch::dtype(torch::get_default_dtype())).normal_(0, deviation);
}

LinearImpl::LinearImpl(std::int64_t in, std::int64_t out, bool with_bias, double deviation) {
  weight = register_parameter("weight", drawn({out, in}, deviation));
  if (with_bias) bias = register_parameter("bias", torch::zeros({out}));
}

LinearImpl::LinearImpl(const at::Tensor& shared_weight, const at::Tensor& shared_bias) {
  weight = register_parameter("weight", shared_weight);
  if (shared_bias.defined()) bias = register_parameter("bias", shared_bias);
}

at::Tensor LinearImpl::forward(const at::Tensor& x) { return adapted(x, torch::linear(x, weight, bias)); }

RmsNormImpl::RmsNormImpl(std::int64_t width, double epsilon, double initial) : epsilon_(epsilon) {
  weight_ = register_parameter("weight", torch::full({width}, initial));
}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) { return rms_norm(x, weight_, epsilon_); }

LayerNormImpl::LayerNormImpl(std::int64_t width, double epsilon)
    : torch::nn::LayerNormImpl(torch::nn::LayerNormOptions({width}).eps(epsilon)) {}

at::Tensor LayerNormImpl::forward(const at::Tensor& x) {
  auto narrowest = x.scalar_type();
  bool one_dtype = true;
  for (const at::Tensor& parameter : {weight, bias}) {
    one_dtype = one_dtype && parameter.scalar_type() == x.scalar_type();
    if (parameter.dtype().itemsize() < torch::elementSize(narrowest)) narrowest = parameter.scalar_type();
  }
  if (one_dtype) return torch::nn::LayerNormImpl::forward(x);
  const auto wide = [](const at::Tensor& tensor) { return tensor.to(torch::kFloat32); };
  const auto& o = options;
  return torch::layer_norm(wide(x), o.normalized_shape(), wide(weight), wide(bias), o.eps()).to(narrowest);
}

torch::nn::Embedding make_embedding(std::int64_t rows, std::int64_t width, double deviation, std::int64_t padding) {
  at::Tensor weight = drawn({rows, width}, deviation);
  torch::nn::EmbeddingOptions options(rows, width);
  if (padding >= 0) {
    const torch::NoGradGuard no_grad;
    weight.select(0, padding).zero_();
    options.padding_idx(padding);
  }
  return torch::nn::Embedding(options._weight(weight));
}

torch::nn::Embedding share_embedding(const at::Tensor& weight) {
  return torch::nn::Embedding(torch::nn::EmbeddingOptions(weight.size(0), weight.size(1))._weight(weight));
}

LayerNorm make_layer_norm(std::int64_t width, double epsilon) { return LayerNorm(width, epsilon); }

std::shared_ptr<torch::nn::Module> make_path(torch::nn::Module& parent, const std::string& name) {
  return parent.register_module(name, std::make_shared<torch::nn::Module>(name));
}

at::Tensor activate(Activation activation, const at::Tensor& x) {
  switch (activation) {
    case Activation::Gelu:
      return torch::gelu(x);
    case Activation::GeluTanh:
      return torch::gelu(x, "tanh");
    case Activation::Relu:
      break;
  }
  return torch::relu(x);
}

Rotary rotary_of(const LlamaConfig& config, const at::Tensor& positions) {
  const std::int64_t width = config.width();
  const auto options = positions.options().dtype(torch::kFloat32);
  at::Tensor frequencies = 1 / torch::pow(config.rope_theta, torch::arange(0, width, 2, options) / width);
  if (config.rope_scaling) {
    const RopeScaling& scaling = *config.rope_scaling;
    const at::Tensor divided = frequencies / scaling.factor;
    if (scaling.kind == RopeScaling::Kind::Linear) {
      frequencies = divided;
    } else {
      const at::Tensor lengths = 2 * std::numbers::pi / frequencies;
      const auto original = static_cast<double>(scaling.original_sequence);
      const at::Tensor share = (original / lengths - scaling.low) / (scaling.high - scaling.low);
      frequencies = torch::where(
          lengths > original / scaling.low, divided,
          torch::where(lengths < original / scaling.high, frequencies, (1 - share) * divided + share * frequencies));
    }
  }
  const at::Tensor half = positions.to(torch::kFloat32).unsqueeze(-1) * frequencies;
  const at::Tensor angles = torch::cat({half, half}, -1);
  return {angles.cos(), angles.sin()};
}

Visible visible(const at::Tensor& mask, std::int64_t queries, std::int64_t keys, bool causal, const at::Tensor& like) {
  if (!mask.defined() && (!causal || queries == keys || queries == 1)) return {{}, causal && queries > 1};
  at::Tensor allowed;
  if (causal) allowed = torch::ones({queries, keys}, like.options().dtype(torch::kBool)).tril(keys - queries);
  if (mask.defined()) {
    const bool flat = mask.dim() == 2 && mask.size(1) == keys;
    TORCH_CHECK(flat || (mask.dim() == 3 && mask.size(1) == queries && mask.size(2) == keys),
                "[models::visible] got an attention mask ", mask.sizes(), ", expected [batch, ", keys, "] or [batch, ",
                queries, ", ", keys, "]");
    at::Tensor given = mask.to(torch::kBool).unsqueeze(1);
    if (flat) given = given.unsqueeze(1);
    allowed = allowed.defined() ? allowed.logical_and(given) : given;
    allowed = allowed.logical_or(allowed.any(-1, true).logical_not());
  }
  const auto low = -std::numeric_limits<double>::infinity();
  return {torch::zeros(allowed.sizes(), like.options()).masked_fill_(allowed.logical_not(), low), false};
}

at::Tensor split_heads(const at::Tensor& x, std::int64_t heads) {
  return x.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2);
}

at::Tensor merge_heads(const at::Tensor& x) { return x.transpose(1, 2).reshape({x.size(0), x.size(2), -1}); }

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Visible& visible, double dropout,
                  std::optional<double> scale) {
  const std::int64_t shared = q.size(1) / k.size(1);
  // libtorch's fused CPU kernel wants as many keys as queries.
  const auto repeated = [shared](const at::Tensor& x) {
    if (shared == 1) return x;
    return x.unsqueeze(2).expand({-1, -1, shared, -1, -1}).flatten(1, 2);
  };
  return at::scaled_dot_product_attention(q, repeated(k), repeated(v),
                                          visible.added.defined() ? std::optional(visible.added) : std::nullopt,
                                          dropout, visible.causal, scale);
}

std::pair<at::Tensor, at::Tensor> KeyValues::append(const at::Tensor& k, const at::Tensor& v) {
  const std::int64_t more = k.size(2), needed = length_ + more;
  if (!k_.defined() || k_.size(2) < needed) {  // grown by doubling, so that appending is linear in all
    const auto grown = [&](const at::Tensor& old, const at::Tensor& like) {
      at::Tensor room =
          at::empty({like.size(0), like.size(1), std::max(2 * length_, needed), like.size(3)}, like.options());
      if (length_ > 0) room.narrow(2, 0, length_).copy_(old.narrow(2, 0, length_));
      return room;
    };
    k_ = grown(k_, k);
    v_ = grown(v_, v);
  }
  k_.narrow(2, length_, more).copy_(k);
  v_.narrow(2, length_, more).copy_(v);
  length_ = needed;
  return {k_.narrow(2, 0, length_), v_.narrow(2, 0, length_)};
}

void Segments::run_by(std::int64_t count, Runner runner) {
  if (count < 1)
    throw std::invalid_argument("[run_layers_by] got count " + std::to_string(count) + ", expected at least 1");
  count_ = count;
  runner_ = std::move(runner);
}

at::Tensor Segments::run(std::int64_t layers, at::Tensor x,
                         const std::function<at::Tensor(std::int64_t, const at::Tensor&)>& layer) const {
  const std::int64_t parts = runner_ ? std::min(count_, layers) : 1;
  for (std::int64_t part = 0; part < parts; ++part) {
    const std::int64_t begin = part * layers / parts, end = (part + 1) * layers / parts;
    const Segment segment = [layer, begin, end](const at::Tensor& input) {
      at::Tensor y = input;
      for (std::int64_t i = begin; i < end; ++i) y = layer(i, y);
      return y;
    };
    x = runner_ ? runner_(segment, x) : segment(x);
  }
  return x;
}

void check_tokens(const char* where, const at::Tensor& tokens, std::int64_t longest) {
  TORCH_CHECK(tokens.dim() == 2 && tokens.size(1) >= 1 && tokens.size(1) <= longest &&
                  (tokens.scalar_type() == torch::kLong || tokens.scalar_type() == torch::kInt),
              "[", where, "] got tokens ", tokens.sizes(), " of ", tokens.scalar_type(),
              ", expected int64 [batch, time] with 1 <= time <= ", longest);
}

void throw_faults(const char* where, const std::string& faults) {
  if (!faults.empty()) throw std::invalid_argument("[" + std::string(where) + "]" + faults);
}

}  // namespace models
