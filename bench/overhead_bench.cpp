// What the engine costs at world 1: one training step of the same GPT under the engine (any stage)
// and in a plain libtorch loop with libtorch's fused AdamW, same threads, interleaved in one run.
//
//   overhead_bench [--layers 8] [--hidden 512] [--batch 1] [--steps 40] [--threads 1] [--stage 3]
#include <zero/zero.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

namespace {
namespace nn = torch::nn;

struct Block : nn::Module {
  nn::LayerNorm before_attention{nullptr}, before_mlp{nullptr};
  nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  std::int64_t heads;
  Block(std::int64_t h, std::int64_t num_heads) : heads(num_heads) {
    before_attention = register_module("before_attention", nn::LayerNorm(nn::LayerNormOptions({h})));
    before_mlp = register_module("before_mlp", nn::LayerNorm(nn::LayerNormOptions({h})));
    qkv = register_module("qkv", nn::Linear(h, 3 * h));
    out = register_module("out", nn::Linear(h, h));
    up = register_module("up", nn::Linear(h, 4 * h));
    down = register_module("down", nn::Linear(4 * h, h));
  }
  at::Tensor forward(at::Tensor x) {
    const auto b = x.size(0), s = x.size(1), h = x.size(2);
    auto parts = qkv(before_attention(x)).view({b, s, 3, heads, h / heads}).permute({2, 0, 3, 1, 4});
    auto y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    x = x + out(y.transpose(1, 2).reshape({b, s, h}));
    return x + down(at::gelu(up(before_mlp(x))));
  }
};

struct Net : nn::Module {
  nn::Embedding tokens{nullptr}, positions{nullptr};
  nn::ModuleList blocks;
  nn::LayerNorm norm{nullptr};
  Net(std::int64_t layers, std::int64_t h) {
    tokens = register_module("tokens", nn::Embedding(8192, h));
    positions = register_module("positions", nn::Embedding(128, h));
    for (int i = 0; i < layers; ++i) blocks->push_back(std::make_shared<Block>(h, 8));
    register_module("blocks", blocks);
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({h})));
  }
  at::Tensor loss(const at::Tensor& ids) {
    const auto s = ids.size(1) - 1;
    auto x = tokens(ids.narrow(1, 0, s)) + positions(at::arange(s));
    for (auto& block : *blocks) x = block->as<Block>()->forward(x);
    const auto logits = at::linear(norm(x), tokens->weight);
    return at::cross_entropy_loss(logits.reshape({-1, 8192}), ids.narrow(1, 1, s).reshape({-1}));
  }
};

struct Plain {
  std::shared_ptr<Net> net;
  std::vector<at::Tensor> data, exp_avg, exp_avg_sq, counts;
  std::vector<at::Tensor> parameters;
  explicit Plain(std::shared_ptr<Net> n) : net(std::move(n)), parameters(net->parameters()) {
    for (auto& p : parameters) {
      data.push_back(p.detach());
      exp_avg.push_back(at::zeros_like(p.detach()));
      exp_avg_sq.push_back(at::zeros_like(p.detach()));
      counts.push_back(at::zeros({}));
    }
  }
  double step(const at::Tensor& ids) {
    auto loss = net->loss(ids);
    loss.backward();
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> grads;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      grads.push_back(parameters[i].grad());
      counts[i] += 1;
    }
    at::_fused_adamw_(data, grads, exp_avg, exp_avg_sq, {}, counts, 3e-4, 0.9, 0.999, 0.01, 1e-8, false, false);
    for (auto& p : parameters) p.mutable_grad() = at::Tensor();
    return loss.item<double>();
  }
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::int64_t> flag{{"--layers", 8}, {"--hidden", 512}, {"--batch", 1}, {"--steps", 40}, {"--threads", 1}, {"--stage", 3}};
  for (int i = 1; i + 1 < argc; i += 2) {
    if (flag.count(argv[i]) == 0) {
      std::fprintf(stderr, "overhead_bench: unknown option %s\n", argv[i]);
      return 2;
    }
    flag[argv[i]] = std::atoll(argv[i + 1]);
  }
  at::set_num_threads(static_cast<int>(flag["--threads"]));
  const auto make = [&] {
    torch::manual_seed(1);
    return std::make_shared<Net>(flag["--layers"], flag["--hidden"]);
  };
  Plain plain(make());
  auto net = make();
  const auto options = zero::Options::from_json(
      R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0,
          "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.01}},
          "zero_optimization": {"stage": )" + std::to_string(flag["--stage"]) + "}}");
  zero::Engine engine(net, options, zero::Communicator::local());
  std::vector<double> ours, theirs, ratios;
  const auto timed = [](const std::function<double()>& fn, double* loss) {
    const auto start = std::chrono::steady_clock::now();
    *loss = fn();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  };
  for (int k = 0; k < flag["--steps"] + 3; ++k) {
    const auto ids = at::randint(0, 8192, {flag["--batch"], 129}, at::kLong);
    double a = 0, b = 0, t[2];
    const auto with = [&] {
      t[0] = timed([&] {
        auto loss = net->loss(ids);
        engine.backward(loss);
        engine.step();
        return loss.item<double>();
      }, &a);
    };
    const auto without = [&] { t[1] = timed([&] { return plain.step(ids); }, &b); };
    // Alternating who goes first cancels drifts of the machine.
    if (k % 2 == 0) with(), without();
    else without(), with();
    if (k < 3) continue;
    ours.push_back(t[0]);
    theirs.push_back(t[1]);
    ratios.push_back(t[0] / t[1]);
    if (a != b) std::printf("step %d: losses differ by %g\n", k, a - b);
  }
  std::printf("{\"engine_ms\": %.2f, \"plain_ms\": %.2f, \"ratio_of_medians\": %.4f, \"median_of_ratios\": %.4f}\n", median(ours),
              median(theirs), median(ours) / median(theirs), median(ratios));
  return 0;
}
