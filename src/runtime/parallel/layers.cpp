#include <zero/nn.h>

#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include <cmath>
#include <utility>

namespace zero::nn {
namespace {

using Kind = LayerCut::Kind;

// As torch::nn::Linear.
void initialize(const at::Tensor& weight, const at::Tensor& bias) {
  torch::nn::init::kaiming_uniform_(weight, std::sqrt(5.0));
  if (!bias.defined()) return;
  const auto inputs = weight.size(1);
  const double bound = inputs > 0 ? 1 / std::sqrt(static_cast<double>(inputs)) : 0;
  torch::nn::init::uniform_(bias, -bound, bound);
}

// As torch::nn::functional::linear.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return at::linear(x, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt);
}

}  // namespace

ColumnParallelLinearImpl::ColumnParallelLinearImpl(ColumnParallelLinearOptions o) : options(std::move(o)) { reset(); }

void ColumnParallelLinearImpl::reset() {
  weight = register_parameter("weight", at::empty({options.out_features, options.in_features}));
  bias = register_parameter("bias", options.bias ? at::empty({options.out_features}) : at::Tensor(), options.bias);
  initialize(weight, bias);
}

at::Tensor ColumnParallelLinearImpl::forward(const at::Tensor& x) { return linear(x, weight, bias); }

std::vector<LayerCut> ColumnParallelLinearImpl::cuts() const {
  LayerCut of_weight{.parameter = "weight",
                     .kind = Kind::Column,
                     .pieces = options.pieces,
                     .multiple = options.multiple,
                     .gather_output = options.gather_output,
                     .sequence = options.sequence};
  LayerCut of_bias = of_weight;
  of_bias.parameter = "bias";
  of_bias.sequence = false;
  if (options.gather_output) of_bias = {.parameter = "bias"};
  return {of_weight, of_bias};
}

RowParallelLinearImpl::RowParallelLinearImpl(RowParallelLinearOptions o) : options(std::move(o)) { reset(); }

void RowParallelLinearImpl::reset() {
  weight = register_parameter("weight", at::empty({options.out_features, options.in_features}));
  bias = register_parameter("bias", options.bias ? at::empty({options.out_features}) : at::Tensor(), options.bias);
  initialize(weight, bias);
}

at::Tensor RowParallelLinearImpl::forward(const at::Tensor& x) { return linear(x, weight, bias); }

std::vector<LayerCut> RowParallelLinearImpl::cuts() const {
  return {{.parameter = "weight",
           .kind = Kind::Row,
           .multiple = options.multiple,
           .scatter_input = !options.input_is_parallel,
           .sequence = options.sequence},
          {.parameter = "bias", .sum_gradient = options.sequence}};
}

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(VocabParallelEmbeddingOptions o) : options(std::move(o)) {
  reset();
}

void VocabParallelEmbeddingImpl::reset() {
  weight = register_parameter("weight", at::empty({options.num_embeddings, options.embedding_dim}));
  torch::nn::init::normal_(weight);
}

at::Tensor VocabParallelEmbeddingImpl::forward(const at::Tensor& ids) { return at::embedding(weight, ids); }

std::vector<LayerCut> VocabParallelEmbeddingImpl::cuts() const {
  return {{.parameter = "weight", .kind = Kind::Column, .gather_output = true, .sequence = options.sequence}};
}

LayerNormImpl::LayerNormImpl(LayerNormOptions o) : options(std::move(o)) { reset(); }

void LayerNormImpl::reset() {
  weight = register_parameter("weight", at::ones({options.features}));
  bias = register_parameter("bias", at::zeros({options.features}));
}

at::Tensor LayerNormImpl::forward(const at::Tensor& x) {
  auto narrowest = x.scalar_type();
  for (const auto& parameter : {weight, bias})
    if (parameter.dtype().itemsize() < c10::elementSize(narrowest)) narrowest = parameter.scalar_type();
  const bool one_dtype = weight.scalar_type() == x.scalar_type() && bias.scalar_type() == x.scalar_type();
  if (one_dtype) return at::layer_norm(x, {options.features}, weight, bias, options.eps);
  const auto wide = [](const at::Tensor& tensor) { return tensor.to(at::kFloat); };
  return at::layer_norm(wide(x), {options.features}, wide(weight), wide(bias), options.eps).to(narrowest);
}

std::vector<LayerCut> LayerNormImpl::cuts() const {
  return {{.parameter = "weight", .sum_gradient = options.sequence},
          {.parameter = "bias", .sum_gradient = options.sequence}};
}

}  // namespace zero::nn
