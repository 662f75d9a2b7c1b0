// See lora.h. Factors are submodules of their layer, so that the layer's own names stay as they are.
#include "models/lora.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>

#include "models/adaptable.h"

namespace models {

struct Lora::Layer {
  Adaptable* layer = nullptr;
  std::shared_ptr<torch::nn::Module> module;
  torch::nn::Linear a{nullptr}, b{nullptr};
};

struct Lora::State {
  LoraOptions options;
  std::map<std::string, Layer> layers;
};

namespace {

constexpr const char *kA = "lora_A", *kB = "lora_B";

void check(const LoraOptions& options) {
  if (options.rank < 1)
    throw std::invalid_argument("[Lora] got rank " + std::to_string(options.rank) + ", expected at least 1");
  if (!(options.dropout >= 0 && options.dropout < 1))
    throw std::invalid_argument("[Lora] got dropout " + std::to_string(options.dropout) +
                                ", expected from 0 up to but without 1");
}

at::Tensor weight_of(const torch::nn::Module& module) {
  const auto own = module.named_parameters(/*recurse=*/false);
  const auto* const weight = own.find("weight");
  if (weight == nullptr || weight->dim() != 2) throw std::invalid_argument("[Lora] got a layer without a weight");
  return *weight;
}

// The factors of a tied weight would change one of its uses, and merged both.
void refuse_tied(const torch::nn::Module& model, const std::string& path, const torch::nn::Module& layer) {
  const at::Tensor weight = weight_of(layer);
  for (const auto& item : model.named_parameters())
    if (item.key() != path + ".weight" && item.value().is_same(weight))
      throw std::invalid_argument("[Lora] got the target " + path + ", whose weight is also " + item.key() +
                                  ", expected layers with a weight of their own. Hint: leave " + path +
                                  " out of the targets, or build the model without tied output");
}

torch::nn::Linear factor(std::int64_t in, std::int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

}  // namespace

Lora::Lora(torch::nn::Module& model, const LoraOptions& options, const std::function<bool(const std::string&)>& chosen,
           const std::function<bool(const std::string&)>& kept)
    : state_(std::make_shared<State>()) {
  check(options);
  state_->options = options;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    auto* const adaptable = dynamic_cast<Adaptable*>(item.value().get());
    if (adaptable == nullptr || !chosen(item.key())) continue;
    refuse_tied(model, item.key(), *item.value());
    state_->layers[item.key()] = {adaptable, item.value(), nullptr, nullptr};
    paths_.push_back(item.key());
  }
  if (paths_.empty()) throw std::invalid_argument("[Lora] got no layer that the targets name");
  for (const auto& item : model.named_parameters())
    if (!kept || !kept(item.key())) item.value().set_requires_grad(false);
  for (const auto& path : paths_) {
    Layer& layer = state_->layers[path];
    // torch::nn::Linear draws its weight from Kaiming's distribution with a = sqrt(5).
    const auto in = weight_of(*layer.module).size(1), out = weight_of(*layer.module).size(0);
    layer.a = layer.module->register_module(kA, factor(in, options.rank));
    layer.b = layer.module->register_module(kB, factor(options.rank, out));
    torch::nn::init::zeros_(layer.b->weight);
    // The layer owns its factors, so the function must not own the layer.
    layer.layer->adapt([a = layer.a, b = layer.b, options, module = layer.module.get()](const at::Tensor& x) mutable {
      return b(a(torch::dropout(x, options.dropout, module->is_training() && options.dropout > 0))) * options.scale();
    });
  }
}

const LoraOptions& Lora::options() const { return state_->options; }

void Lora::merge(const std::string& path) {
  const torch::NoGradGuard no_grad;
  const Layer& layer = state_->layers.at(path);
  const at::Tensor weight = weight_of(*layer.module);
  const auto on_cpu = [](const at::Tensor& x) { return x.to(torch::kCPU, torch::kFloat).contiguous(); };
  at::Tensor sum = weight.to(torch::kCPU, torch::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous();
  add_change(on_cpu(layer.a->weight), on_cpu(layer.b->weight), state_->options.scale(), 0,
             {sum.mutable_data_ptr<float>(), static_cast<std::size_t>(sum.numel())});
  weight.copy_(sum);
  layer.layer->adapt(nullptr);
}

void Lora::add_change(const at::Tensor& a, const at::Tensor& b, double scale, std::int64_t begin,
                      std::span<float> values) {
  const std::int64_t rank = a.size(0), in = a.size(1), end = begin + static_cast<std::int64_t>(values.size());
  const float *const left = b.const_data_ptr<float>(), *const right = a.const_data_ptr<float>();
  const auto factor = static_cast<float>(scale);
  std::vector<float> sums(static_cast<std::size_t>(in));
  float* out = values.data();
  for (std::int64_t row = begin / in; row * in < end; ++row) {
    const std::int64_t first = std::max(begin - row * in, std::int64_t{0}), last = std::min(end - row * in, in);
    std::fill(sums.begin(), sums.end(), 0.0F);
    for (std::int64_t r = 0; r < rank; ++r) {
      const float by = left[row * rank + r];
      for (std::int64_t i = first; i < last; ++i) sums[static_cast<std::size_t>(i)] += by * right[r * in + i];
    }
    for (std::int64_t i = first; i < last; ++i) *out++ += factor * sums[static_cast<std::size_t>(i)];
  }
}

std::vector<std::string> Lora::parameters() const {
  std::vector<std::string> names;
  for (const auto& path : paths_)
    for (const char* const part : {kA, kB}) names.push_back(path + "." + part + ".weight");
  return names;
}

bool Lora::is_factor(const std::string& name) {
  return name.ends_with(std::string(".") + kA + ".weight") || name.ends_with(std::string(".") + kB + ".weight");
}

}  // namespace models
