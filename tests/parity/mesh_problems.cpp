#include "parity/mesh_problems.h"

#include <gtest/gtest.h>

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <sstream>
#include <utility>

#include "models/gpt.h"
#include "support/require.h"

namespace zero::test::mesh {
namespace {

constexpr std::int64_t kBatch = 3;

// --- modules that know nothing of ranks ---------------------------------------------------------

// Linears with a 2-dimensional input, which libtorch computes as addmm.
struct FlatMlpImpl : torch::nn::Module {
  torch::nn::Linear up{nullptr}, middle{nullptr}, down{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  FlatMlpImpl() {
    up = register_module("up", torch::nn::Linear(6, 14));
    middle = register_module("middle", torch::nn::Linear(14, 9));
    down = register_module("down", torch::nn::Linear(9, 4));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({9})));
  }
  at::Tensor forward(const at::Tensor& x) {
    return down(norm(middle(torch::tanh(up(x.flatten(0, 1)))))).view({x.size(0), x.size(1), 4});
  }
};
TORCH_MODULE(FlatMlp);

// Two column layers with one input, whose product goes into a row layer.
struct GatedImpl : torch::nn::Module {
  torch::nn::Linear gate{nullptr}, up{nullptr}, down{nullptr};
  GatedImpl() {
    gate = register_module("gate", torch::nn::Linear(torch::nn::LinearOptions(6, 10).bias(false)));
    up = register_module("up", torch::nn::Linear(6, 10));
    down = register_module("down", torch::nn::Linear(10, 6));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::silu(gate(x)) * up(x)); }
};
TORCH_MODULE(Gated);

// Grouped-query attention: 8 query heads of width 3, 4 heads of keys and values; k and v are one fused weight.
struct GroupedImpl : torch::nn::Module {
  torch::nn::Linear q{nullptr}, kv{nullptr}, out{nullptr};
  GroupedImpl() {
    q = register_module("q", torch::nn::Linear(6, 24));
    kv = register_module("kv", torch::nn::Linear(6, 24));
    out = register_module("out", torch::nn::Linear(24, 6));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto b = x.size(0), s = x.size(1);
    const auto heads = [&](const at::Tensor& y) { return y.view({b, s, -1, 3}).transpose(1, 2); };
    const auto queries = heads(q(x));
    const auto both = kv(x).chunk(2, -1);
    const auto keys = heads(both[0]).repeat_interleave(2, 1), values = heads(both[1]).repeat_interleave(2, 1);
    const auto weights = torch::softmax(queries.matmul(keys.transpose(-1, -2)) / std::sqrt(3.0), -1);
    return x + out(weights.matmul(values).transpose(1, 2).reshape({b, s, -1}));
  }
};
TORCH_MODULE(Grouped);

// A model of one list of layers, which are its units.
template <class Layer>
struct StackImpl : torch::nn::Module {
  torch::nn::ModuleList layers{nullptr};
  StackImpl() {
    layers = register_module("layers", torch::nn::ModuleList());
    layers->push_back(Layer());
    layers->push_back(Layer());
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) x = layer->as<typename Layer::Impl>()->forward(x);
    return x;
  }
};

at::ScalarType dtype_of(const torch::nn::Module& module) { return module.parameters().front().scalar_type(); }

// Of random targets, so that gradients do not vanish while a model learns.
template <class M>
at::Tensor loss_of_features(torch::nn::Module& module, std::uint64_t seed, double out) {
  const auto x = draw({kBatch, kTokens, 6}, seed);
  const auto y = dynamic_cast<M&>(module).forward(x.to(dtype_of(module))).to(at::kFloat);
  return (y - out - draw(y.sizes().vec(), seed + 50000)).pow(2).mean();
}

at::Tensor text_of(std::uint64_t seed) {
  return at::randint(0, 23, {kBatch, kTokens + 1}, at::detail::createCPUGenerator(seed), at::kLong);
}

template <class M>
at::Tensor loss_of_text(torch::nn::Module& module, std::uint64_t seed) {
  auto& gpt = dynamic_cast<M&>(module);
  const auto tokens = text_of(seed);
  return gpt.forward(tokens.narrow(1, 0, kTokens).contiguous(), tokens.narrow(1, 1, kTokens).contiguous());
}

}  // namespace

at::Tensor draw(std::vector<std::int64_t> sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions());
}

::models::GptConfig gpt_config() {
  return {.layers = 2, .hidden = 24, .heads = 6, .sequence = 8, .vocabulary = 23, .tied_output = true};
}

const std::vector<Model>& models() {
  static const std::vector<Model> all{
      {"flat",
       R"([{"patterns": ["up\\.weight"], "partition_type": "column"},
           {"patterns": ["middle\\.weight"], "partition_type": "row"},
           {"patterns": ["down\\.weight"], "partition_type": "column", "gather_output": true},
           {"patterns": [".*norm.*"], "partition_type": "skip"}])",
       [] { return std::make_shared<FlatMlpImpl>(); },
       [](torch::nn::Module& m, std::uint64_t seed) { return loss_of_features<FlatMlpImpl>(m, seed, 0.5); }},
      {"gated",
       R"([{"patterns": [".*\\.(gate|up)\\.weight"], "partition_type": "column"},
           {"patterns": [".*\\.down\\.weight"], "partition_type": "row"}])",
       [] { return std::make_shared<StackImpl<Gated>>(); },
       [](torch::nn::Module& m, std::uint64_t seed) { return loss_of_features<StackImpl<Gated>>(m, seed, 0.3); }},
      {"grouped",
       R"([{"patterns": [".*\\.q\\.weight"], "partition_type": "column", "multiple": 6},
           {"patterns": [".*\\.kv\\.weight"], "partition_type": "column", "shape": [2, -1], "multiple": 3},
           {"patterns": [".*\\.out\\.weight"], "partition_type": "row", "multiple": 6}])",
       [] { return std::make_shared<StackImpl<Grouped>>(); },
       [](torch::nn::Module& m, std::uint64_t seed) { return loss_of_features<StackImpl<Grouped>>(m, seed, 0.3); }},
      {"gpt", nullptr, [] { return std::make_shared<::models::GptImpl>(gpt_config()); },
       [](torch::nn::Module& m, std::uint64_t seed) { return loss_of_text<::models::GptImpl>(m, seed); }}};
  return all;
}

void fill(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  std::uint64_t seed = 1;
  for (auto& item : module.named_parameters()) {
    auto& p = item.value();
    p.copy_(draw(p.sizes().vec(), ++seed) * 0.2 + (p.dim() == 1 ? 0.3 : 0.0));
  }
}

std::shared_ptr<torch::nn::Module> make_model(const Model& model) {
  auto module = model.make();
  fill(*module);
  return module;
}

const Model& gpt_model() { return models().back(); }

Options Case::options() const {
  std::ostringstream out;
  out << R"({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": )" << accumulation
      << R"(, "gradient_clipping": )" << clip
      << R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 0.001, "weight_decay": 0.1}}, "zero_optimization": {"stage": )"
      << stage << zero << "}, \"sequence_parallel_size\": " << u << R"(, "tensor_parallel": {"autotp_size": )" << t;
  if (model->plan)
    out << R"(, "partition_config": {"use_default_specs": false, "layer_specs": )" << model->plan << "}";
  else
    out << R"(, "partition_config": {"layer_specs": [{"patterns": ["blocks\\.\\d+\\.qkv\\.weight"],
               "partition_type": "column", "shape": [3, -1], "multiple": 4},
               {"patterns": ["blocks\\.\\d+\\.projection\\.weight"], "partition_type": "row", "multiple": 4}]},
               "preset_model": "gpt")";
  out << "}";
  if (recipe != "fp32") out << ", \"" << recipe << R"(": {"enabled": true)" << recipe_keys << "}";
  out << extra << "}";
  return Options::from_json(out.str());
}

void divide_sequence(::models::GptImpl& gpt, const Mesh& mesh, std::int64_t tokens) {
  gpt.first_position(mesh.tokens(tokens).first);
  gpt.attend_by([&mesh, tokens](const auto& local, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    const auto turned = [&](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
      return local(a.transpose(1, 2), b.transpose(1, 2), c.transpose(1, 2)).transpose(1, 2);
    };
    return attention_over_heads(mesh, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), turned, tokens)
        .transpose(1, 2);
  });
}

namespace {

// A backward of this rank's tokens. Returns the mean loss of all tokens.
double backward_of_stretch(Engine& engine, ::models::GptImpl& gpt, std::uint64_t seed) {
  const auto [begin, end] = engine.mesh().tokens(kTokens);
  const auto text = text_of(seed);
  const std::int64_t tokens = kBatch * (end - begin);
  const auto sum = gpt.forward(text.narrow(1, begin, end - begin).contiguous(),
                               text.narrow(1, begin + 1, end - begin).contiguous()) *
                   static_cast<double>(tokens);
  engine.backward(sum, {.tokens = tokens});
  double all = 0;
  for (const auto& one : engine.mesh().group("sp")->all_gather_bytes(std::to_string(sum.item<double>())))
    all += std::stod(one);
  return all / static_cast<double>(kBatch * kTokens);
}

}  // namespace

double backward(Engine& engine, torch::nn::Module& module, const Case& c, std::uint64_t seed) {
  if (c.u > 1) return backward_of_stretch(engine, dynamic_cast<::models::GptImpl&>(module), seed);
  const auto loss = c.model->loss(module, seed);
  engine.backward(loss);
  return loss.item<double>();
}

Result train(const Case& c, const std::shared_ptr<Communicator>& comm) {
  auto module = make_model(*c.model);
  Engine engine(module, c.options(), comm);
  if (c.u > 1) divide_sequence(dynamic_cast<::models::GptImpl&>(*module), engine.mesh(), kTokens);
  Result result;
  for (int step = 0; step < c.steps; ++step) {
    for (int micro = 0; micro < c.accumulation; ++micro) {
      result.losses.push_back(backward(engine, *module, c, seed_of(step, micro, engine.mesh().rank("dp"))));
      if (c.with_gradients && micro + 1 == c.accumulation) {
        result.gradients.emplace_back();
        for (const auto& item : module->named_parameters())
          result.gradients.back()[item.key()] = engine.gradient(item.key());
      }
      const auto done = engine.step();
      if (done.overflow) result.skipped.insert(step);
      if (micro + 1 == c.accumulation && !done.overflow) result.norms.push_back(done.grad_norm);
    }
  }
  result.masters = engine.full_state_dict();
  result.hash = engine.state_hash();
  return result;
}

// The reference, of one process: AdamW in fp64 on gradients of a whole module in fp32.
Result train_by_hand(const Case& c, int data_ranks, int own, const std::set<int>& skipped) {
  auto module = make_model(*c.model);
  const auto named = module->named_parameters();
  std::vector<at::Tensor> masters, first, second;
  for (const auto& item : named) {
    masters.push_back(item.value().detach().to(at::kDouble));
    first.push_back(at::zeros_like(masters.back()));
    second.push_back(at::zeros_like(masters.back()));
  }
  Result result;
  int updates = 0;
  const auto apply = [&](const std::vector<at::Tensor>& gradients) {
    ++updates;
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < masters.size(); ++i) {
      first[i] = 0.9 * first[i] + 0.1 * gradients[i];
      second[i] = 0.999 * second[i] + 0.001 * gradients[i] * gradients[i];
      const auto mean = first[i] / (1 - std::pow(0.9, updates)), square = second[i] / (1 - std::pow(0.999, updates));
      masters[i] -= 0.01 * (mean / (square.sqrt() + 0.001) + 0.1 * masters[i]);
      named[i].value().copy_(masters[i]);
    }
  };
  std::vector<at::Tensor> kept_back;  // a step's gradients, applied after the next one's backward
  for (int step = 0; step < c.steps; ++step) {
    std::vector<at::Tensor> gradients;
    for (const auto& master : masters) gradients.push_back(at::zeros_like(master));
    for (int micro = 0; micro < c.accumulation; ++micro)
      for (int d = 0; d < data_ranks; ++d) {
        module->zero_grad();
        const auto loss = c.model->loss(*module, seed_of(step, micro, d));
        if (d == own) result.losses.push_back(loss.item<double>());
        loss.backward();
        for (std::size_t i = 0; i < masters.size(); ++i) gradients[i] += named[i].value().grad().to(at::kDouble);
      }
    if (!kept_back.empty()) apply(std::exchange(kept_back, {}));
    if (skipped.contains(step)) continue;
    double squares = 0;
    for (auto& gradient : gradients) {
      gradient /= c.accumulation * data_ranks;
      squares += gradient.pow(2).sum().item<double>();
    }
    const double norm = std::sqrt(squares);
    result.norms.push_back(norm);
    if (c.with_gradients) {
      result.gradients.emplace_back();
      for (std::size_t i = 0; i < masters.size(); ++i) result.gradients.back()[named[i].key()] = gradients[i].clone();
    }
    if (c.clip > 0 && norm > c.clip)
      for (auto& gradient : gradients) gradient *= c.clip / (norm + 1e-6);
    if (c.late_from >= 0 && step >= c.late_from)
      kept_back = std::move(gradients);
    else
      apply(gradients);
  }
  if (!kept_back.empty()) apply(kept_back);
  for (std::size_t i = 0; i < masters.size(); ++i) result.masters[named[i].key()] = masters[i];
  return result;
}

void compare(const Result& got, const Result& wanted, const Case& c, const Communicator& comm) {
  const auto require_close = [](double apart, double limit, const std::string& what) {
    require(apart < limit, what + ": apart by " + std::to_string(apart));
  };
  const double tolerance = c.recipe == "fp32" ? 1e-5 : 2e-2;
  const std::string where = std::string(c.model->name) + " t " + std::to_string(c.t) + " u " + std::to_string(c.u) +
                            " stage " + std::to_string(c.stage) + c.zero + " " + c.recipe + " rank " +
                            std::to_string(comm.rank()) + " ";
  require_close(apart(got.losses, wanted.losses), tolerance, where + "losses");
  require_close(apart(got.norms, wanted.norms), 2 * tolerance, where + "norms");
  if (comm.rank() != 0) return;
  require(got.masters.size() == wanted.masters.size(), where + "names of parameters");
  const auto before = make_model(*c.model);
  for (const auto& item : before->named_parameters()) {
    const auto &a = got.masters.at(item.key()).to(at::kDouble), &b = wanted.masters.at(item.key());
    require(a.sizes() == b.sizes(), where + item.key() + " has another shape");
    const double update = (b - item.value().detach().to(at::kDouble)).norm().item<double>();
    require_close((a - b).norm().item<double>() / update, c.recipe == "fp32" ? 1e-3 : 0.1,
                  where + "update of " + item.key());
  }
}

double apart(const std::vector<double>& a, const std::vector<double>& b) {
  require(a.size() == b.size(), "as many numbers");
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]) / std::abs(b[i]));
  return most;
}

void expect_passed(const Place& place, const Body& body) {
  EXPECT_EQ(run_at(place,
                   [&](const auto& comm) {
                     at::set_num_threads(1);
                     body(comm);
                   }),
            "")
      << name_of(place);
}

}  // namespace zero::test::mesh
