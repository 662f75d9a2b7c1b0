#include "parity/problems.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformer.h>

#include <stdexcept>

namespace zero::test {
namespace {
namespace nn = torch::nn;

// Inputs are drawn on the CPU, so that they are the same for all devices, and copied to the module's device.
thread_local at::Device input_device = at::kCPU;

at::Tensor randn(at::IntArrayRef sizes, const at::Generator& generator, at::ScalarType dtype) {
  return at::randn(sizes, generator, at::TensorOptions().dtype(at::kFloat)).to(dtype).to(input_device);
}
at::Tensor tokens(at::IntArrayRef sizes, std::int64_t most, const at::Generator& generator) {
  return at::randint(0, most, sizes, generator, at::TensorOptions().dtype(at::kLong)).to(input_device);
}
at::Tensor mean_square(const at::Tensor& t) { return t.to(at::kFloat).pow(2).mean(); }

struct Mlp : nn::Module {
  nn::ModuleList layers;
  explicit Mlp(std::vector<std::int64_t> widths) {
    for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
      layers->push_back(nn::Linear(widths[i], widths[i + 1]));
      layers->push_back(nn::LayerNorm(nn::LayerNormOptions({widths[i + 1]})));
    }
    register_module("layers", layers);
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < layers->size(); i += 2) {
      x = layers[i]->as<nn::Linear>()->forward(x);
      x = at::gelu(layers[i + 1]->as<nn::LayerNorm>()->forward(x));
    }
    return x;
  }
};

struct Attend : nn::Module {
  nn::LayerNorm norm{nullptr};
  nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  std::int64_t width, heads;
  Attend(std::int64_t w, std::int64_t h) : width(w), heads(h) {
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({w})));
    qkv = register_module("qkv", nn::Linear(w, 3 * w));
    out = register_module("out", nn::Linear(w, w));
    up = register_module("up", nn::Linear(w, 4 * w));
    down = register_module("down", nn::Linear(4 * w, w));
  }
  at::Tensor forward(at::Tensor x) {
    const auto b = x.size(0), s = x.size(1);
    auto parts = qkv(norm(x)).view({b, s, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    auto y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    x = x + out(y.transpose(1, 2).reshape({b, s, width}));
    return x + down(at::gelu(up(norm(x))));
  }
};

struct TinyGpt : nn::Module {
  nn::Embedding tokens{nullptr}, positions{nullptr};
  nn::ModuleList blocks;
  nn::LayerNorm norm{nullptr};
  at::Tensor head;
  TinyGpt(std::int64_t vocabulary, std::int64_t width, int layers) {
    tokens = register_module("tokens", nn::Embedding(vocabulary, width));
    positions = register_module("positions", nn::Embedding(16, width));
    for (int i = 0; i < layers; ++i) blocks->push_back(std::make_shared<Attend>(width, 4));
    register_module("blocks", blocks);
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    head = register_parameter("head", tokens->weight);  // tied: one parameter, two places
  }
  at::Tensor forward(at::Tensor ids) {
    auto x = tokens(ids) + positions(at::arange(ids.size(1), ids.options()));
    for (auto& block : *blocks) x = block->as<Attend>()->forward(x);
    return at::linear(norm(x), head);
  }
};

template <class M>
Problem simple(std::string name, std::function<std::shared_ptr<M>()> make,
               std::function<at::Tensor(M&, const at::Generator&, at::ScalarType)> loss) {
  return {std::move(name), [make] { return std::static_pointer_cast<nn::Module>(make()); },
          [loss](nn::Module& module, const at::Generator& g, at::ScalarType d) {
            return loss(dynamic_cast<M&>(module), g, d);
          }};
}

struct Conv : nn::Module {
  nn::Conv2d first{nullptr}, second{nullptr};
  nn::BatchNorm2d batch{nullptr};
  nn::Conv1d line{nullptr};
  bool normalise;
  explicit Conv(bool with_batch_norm) : normalise(with_batch_norm) {
    first = register_module("first", nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1).bias(!normalise)));
    if (normalise) batch = register_module("batch", nn::BatchNorm2d(8));
    second = register_module("second", nn::Conv2d(nn::Conv2dOptions(8, 5, 3).stride(2)));
    line = register_module("line", nn::Conv1d(nn::Conv1dOptions(5, 7, 2)));
  }
  at::Tensor forward(at::Tensor x) {
    x = first(x);
    if (normalise) x = batch(x);
    return line(second(at::relu(x)).flatten(2));
  }
};

struct Recurrent : nn::Module {
  nn::LSTM lstm{nullptr};
  nn::GRU gru{nullptr};
  nn::Linear out{nullptr};
  Recurrent() {
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(6, 10).num_layers(2)));
    gru = register_module("gru", nn::GRU(nn::GRUOptions(10, 9).bidirectional(true)));
    out = register_module("out", nn::Linear(18, 3));
  }
  at::Tensor forward(at::Tensor x) { return out(std::get<0>(gru(std::get<0>(lstm(x))))); }
};

struct Attention : nn::Module {
  nn::MultiheadAttention attention{nullptr};
  Attention() {
    attention = register_module("attention", nn::MultiheadAttention(nn::MultiheadAttentionOptions(16, 4)));
  }
  at::Tensor forward(at::Tensor x) { return std::get<0>(attention(x, x, x)); }
};

struct Encoder : nn::Module {
  nn::Transformer transformer{nullptr};
  Encoder() {
    auto options = nn::TransformerOptions(16, 4, 2, 2);
    options.dim_feedforward(24).dropout(0.0);
    transformer = register_module("transformer", nn::Transformer(options));
  }
  at::Tensor forward(at::Tensor source, at::Tensor target) { return transformer(source, target); }
};

struct Containers : nn::Module {
  nn::Sequential sequence{nullptr};
  nn::AnyModule any;
  Containers() {
    sequence = register_module("sequence",
                               nn::Sequential(nn::Linear(6, 9), nn::ReLU(), nn::LayerNorm(nn::LayerNormOptions({9})),
                                              nn::Linear(9, 5), nn::Tanh()));
    any = nn::AnyModule(nn::Linear(5, 4));
    register_module("any", any.ptr());
  }
  at::Tensor forward(at::Tensor x) { return any.forward(sequence->forward(x)); }
};

struct Reused : nn::Module {
  nn::Linear shared{nullptr}, last{nullptr};
  Reused() {
    shared = register_module("shared", nn::Linear(7, 7));
    last = register_module("last", nn::Linear(7, 2));
  }
  at::Tensor forward(at::Tensor x) { return last(at::tanh(shared(at::tanh(shared(x))))); }
};

struct Frozen : nn::Module {
  nn::ModuleList layers;
  Frozen() {
    for (int i = 0; i < 3; ++i) layers->push_back(nn::Linear(12, 12));
    register_module("layers", layers);
    for (auto& p : layers[1]->parameters()) p.set_requires_grad(false);
    layers[2]->as<nn::Linear>()->bias.set_requires_grad(false);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : *layers) x = at::tanh(layer->as<nn::Linear>()->forward(x));
    return x;
  }
};

// Which branch is used changes from step to step; a third is never used.
struct Branches : nn::Module {
  nn::Linear in{nullptr};
  nn::ModuleList branches;
  int step = 0;
  Branches() {
    in = register_module("in", nn::Linear(8, 8));
    for (int i = 0; i < 3; ++i) branches->push_back(nn::Linear(8, 8));
    register_module("branches", branches);
  }
  at::Tensor forward(at::Tensor x) { return branches[step++ % 2]->as<nn::Linear>()->forward(at::relu(in(x))); }
};

// 0-dim, 1-element and odd sizes; fewer elements than ranks in one unit.
struct Tiny : nn::Module {
  at::Tensor scale, shift, empty;
  nn::ModuleList units;
  Tiny() {
    scale = register_parameter("scale", at::ones({}));
    shift = register_parameter("shift", at::zeros({1}));
    empty = register_parameter("empty", at::zeros({0, 3}));
    units->push_back(nn::Linear(nn::LinearOptions(1, 1).bias(false)));
    units->push_back(nn::Linear(1, 13));
    units->push_back(nn::Linear(13, 7));
    register_module("units", units);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& unit : *units) x = unit->as<nn::Linear>()->forward(x);
    return x * scale + shift;
  }
};

struct ScaledTanh : torch::autograd::Function<ScaledTanh> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, at::Tensor weight) {
    auto y = at::tanh(x.matmul(weight));
    context->save_for_backward({x, weight, y});
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const auto inner = grads[0] * (1 - saved[2] * saved[2]);
    return {inner.matmul(saved[1].t()), saved[0].t().matmul(inner)};
  }
};

struct Custom : nn::Module {
  at::Tensor weight;
  nn::Linear out{nullptr};
  Custom() {
    weight = register_parameter("weight", at::zeros({9, 11}));
    out = register_module("out", nn::Linear(11, 3));
  }
  at::Tensor forward(at::Tensor x) { return out(ScaledTanh::apply(x, weight)); }
};

// Sequences of eight tokens that repeat with a period, so that there is something to learn.
at::Tensor periodic(const at::Generator& generator, std::int64_t count) {
  return (tokens({count, 1}, 8, generator) + at::arange(9, at::TensorOptions().dtype(at::kLong).device(input_device)))
      .remainder(8);
}

// Parameters that are viewed and added, such as queries and positions: autograd delivers their gradients as views that
// share memory with each other and with gradients that propagate further.
struct Viewed : nn::Module {
  struct AddPosition : nn::Module {
    at::Tensor position;
    AddPosition() { position = register_parameter("position", at::zeros({24, 32})); }
    at::Tensor forward(const at::Tensor& x) { return x + position.unsqueeze(0); }
  };
  nn::ModuleList layers;
  at::Tensor latents, offsets;
  Viewed() {
    latents = register_parameter("latents", at::zeros({24, 32}));
    offsets = register_parameter("offsets", at::zeros({24, 32}));
    layers->push_back(nn::Linear(32, 32));
    layers->push_back(std::make_shared<AddPosition>());
    layers->push_back(nn::Linear(32, 32));
    register_module("layers", layers);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = (latents.unsqueeze(0) + offsets.unsqueeze(0)) * x;  // a batch of one
    y = layers[0]->as<nn::Linear>()->forward(y);
    y = layers[1]->as<AddPosition>()->forward(y);
    return at::tanh(layers[2]->as<nn::Linear>()->forward(y));
  }
};

at::Tensor gpt_loss(TinyGpt& model, const at::Tensor& ids, std::int64_t vocabulary) {
  const auto logits = model.forward(ids.narrow(1, 0, 8));
  return at::cross_entropy_loss(logits.to(at::kFloat).reshape({-1, vocabulary}), ids.narrow(1, 1, 8).reshape({-1}));
}

}  // namespace

const std::vector<Problem>& problems() {
  using G = const at::Generator&;
  using D = at::ScalarType;
  static const std::vector<Problem> all{
      simple<Mlp>(
          "mlp",
          [] {
            return std::make_shared<Mlp>(std::vector<std::int64_t>{10, 33, 21, 6});
          },
          [](Mlp& m, G g, D d) {
            return mean_square(m.forward(randn({4, 10}, g, d)) - randn({4, 6}, g, d));
          }),
      simple<TinyGpt>(
          "gpt", [] { return std::make_shared<TinyGpt>(29, 16, 3); },
          [](TinyGpt& m, G g, D) { return gpt_loss(m, periodic(g, 2), 29); }),
      simple<TinyGpt>(
          "aligned_gpt", [] { return std::make_shared<TinyGpt>(32, 16, 2); },
          [](TinyGpt& m, G g, D) { return gpt_loss(m, periodic(g, 2), 32); }),
      simple<TinyGpt>(
          "padded_free_gpt", [] { return std::make_shared<TinyGpt>(128, 128, 3); },
          [](TinyGpt& m, G g, D) { return gpt_loss(m, periodic(g, 2), 128); }),
      simple<TinyGpt>(
          "joined_gpt", [] { return std::make_shared<TinyGpt>(32, 32, 2); },
          [](TinyGpt& m, G g, D) { return gpt_loss(m, periodic(g, 4), 32); }),
      simple<Conv>(
          "convolution", [] { return std::make_shared<Conv>(false); },
          [](Conv& m, G g, D d) {
            return mean_square(m.forward(randn({2, 3, 8, 8}, g, d)));
          }),
      simple<Conv>(
          "batch_norm", [] { return std::make_shared<Conv>(true); },
          [](Conv& m, G g, D d) {
            return mean_square(m.forward(randn({4, 3, 8, 8}, g, d)));
          }),
      simple<Recurrent>(
          "recurrent", [] { return std::make_shared<Recurrent>(); },
          [](Recurrent& m, G g, D d) {
            return mean_square(m.forward(randn({5, 2, 6}, g, d)));
          }),
      simple<Attention>(
          "attention", [] { return std::make_shared<Attention>(); },
          [](Attention& m, G g, D d) {
            return mean_square(m.forward(randn({5, 2, 16}, g, d)));
          }),
      simple<Encoder>(
          "transformer", [] { return std::make_shared<Encoder>(); },
          [](Encoder& m, G g, D d) {
            return mean_square(m.forward(randn({5, 2, 16}, g, d), randn({3, 2, 16}, g, d)) - 0.5);
          }),
      simple<Containers>(
          "containers", [] { return std::make_shared<Containers>(); },
          [](Containers& m, G g, D d) {
            return mean_square(m.forward(randn({4, 6}, g, d)) - 1);
          }),
      simple<Reused>(
          "reused", [] { return std::make_shared<Reused>(); },
          [](Reused& m, G g, D d) {
            return mean_square(m.forward(randn({4, 7}, g, d)) - 1);
          }),
      simple<Frozen>(
          "frozen", [] { return std::make_shared<Frozen>(); },
          [](Frozen& m, G g, D d) {
            return mean_square(m.forward(randn({4, 12}, g, d)) - 1);
          }),
      simple<Branches>(
          "branches", [] { return std::make_shared<Branches>(); },
          [](Branches& m, G g, D d) {
            return mean_square(m.forward(randn({4, 8}, g, d)) - 1);
          }),
      simple<Tiny>(
          "tiny", [] { return std::make_shared<Tiny>(); },
          [](Tiny& m, G g, D d) {
            return mean_square(m.forward(randn({4, 1}, g, d)) - 1);
          }),
      simple<Viewed>(
          "viewed", [] { return std::make_shared<Viewed>(); },
          [](Viewed& m, G g, D d) {
            return mean_square(m.forward(randn({1, 24, 32}, g, d)) - 1);
          }),
      simple<Custom>(
          "custom_function", [] { return std::make_shared<Custom>(); },
          [](Custom& m, G g, D d) {
            return mean_square(m.forward(randn({4, 9}, g, d)) - 1);
          }),
  };
  return all;
}

const Problem& problem(const std::string& name) {
  for (const auto& p : problems())
    if (p.name == name) return p;
  throw std::invalid_argument("no problem " + name);
}

void fill_parameters(torch::nn::Module& module, std::uint64_t seed) {
  at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  for (auto& p : module.parameters()) p.copy_(at::randn(p.sizes(), generator, at::TensorOptions()) * 0.2);
}

std::shared_ptr<torch::nn::Module> make_module(const Problem& problem) {
  auto module = problem.make();
  fill_parameters(*module, 7);
  return module;
}

at::Tensor loss_of(const Problem& problem, torch::nn::Module& module, int rank, int step, at::ScalarType dtype) {
  input_device = module.parameters().front().device();
  return problem.loss(module, at::detail::createCPUGenerator(static_cast<std::uint64_t>(1000 * step + rank + 1)),
                      dtype);
}

at::Tensor joined_loss(const Problem&, torch::nn::Module& module, int world, int step) {
  std::vector<at::Tensor> ids;
  for (int rank = 0; rank < world; ++rank)
    ids.push_back(periodic(at::detail::createCPUGenerator(static_cast<std::uint64_t>(1000 * step + rank + 1)), 4));
  return gpt_loss(dynamic_cast<TinyGpt&>(module), at::cat(ids), 32);
}

}  // namespace zero::test
