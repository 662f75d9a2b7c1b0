// Speed of the update and of the element-wise kernels beside libtorch's own, in one process: every
// round runs each variant once, so that a slow moment of the machine hits all of them; medians are
// shown. The work is bound by memory, so GB/s counts the bytes a perfect pass must move.
//
//   optimizer_bench [elements=33554432] [threads=all] [rounds=15]
#include <omp.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include <ATen/ops/_fused_adamw.h>

#include "optim/sharded_optimizer.h"

namespace {

using zero::base::Dtype;

struct Variant {
  const char* name;
  double bytes;  // per element
  std::function<void()> run;
  const char* baseline = nullptr;
  std::vector<double> seconds = {};
  double median() {
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }
};

struct States {
  at::Tensor p, m, v, g, copy;
  States(std::int64_t numel, at::ScalarType compute)
      : p(torch::randn({numel})),
        m(torch::zeros({numel})),
        v(torch::zeros({numel})),
        g(torch::randn({numel}).to(compute)),
        copy(p.to(compute)) {}
};

Dtype dtype_of(const at::Tensor& t) { return t.scalar_type() == at::kFloat ? Dtype::F32 : Dtype::BF16; }

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t numel = argc > 1 ? std::atoll(argv[1]) : std::int64_t{1} << 25;
  const int threads = argc > 2 ? std::atoi(argv[2]) : omp_get_max_threads(),
            rounds = argc > 3 ? std::atoi(argv[3]) : 15;
  omp_set_num_threads(threads);
  at::set_num_threads(threads);
  at::NoGradGuard no_grad;

  zero::config::OptimizerSettings settings;
  settings.type = zero::config::OptimizerType::AdamW;
  settings.weight_decay = 0.01;
  zero::optim::ShardedOptimizer optimizer(settings, {}, {});
  const auto ours = [&](States& s, float factor) {
    zero::optim::Span span;
    span.master = s.p.data_ptr<float>();
    span.slots[0] = s.m.data_ptr<float>();
    span.slots[1] = s.v.data_ptr<float>();
    span.gradient = s.g.const_data_ptr();
    span.gradient_dtype = span.parameter_dtype = dtype_of(s.g);
    span.parameter = s.g.scalar_type() == at::kFloat ? nullptr : s.copy.data_ptr();
    span.numel = numel;
    optimizer.begin_step();
    optimizer.update(span, factor);
    optimizer.end_step();
  };
  const auto step = torch::zeros({});
  const auto torchs = [&](States& s, const at::Tensor& gradient) {
    step.add_(1);
    at::_fused_adamw_({s.p}, {gradient}, {s.m}, {s.v}, {}, {step}, settings.lr, settings.beta1, settings.beta2,
                      settings.weight_decay, settings.eps, false, false, {}, {});
  };

  States a(numel, at::kFloat), b(numel, at::kFloat), c(numel, at::kBFloat16), d(numel, at::kBFloat16);
  std::vector<at::Tensor> tensors;
  std::vector<const void*> parts;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(torch::randn({numel}).to(at::kBFloat16));
    parts.push_back(tensors.back().const_data_ptr());
  }
  auto sum = torch::zeros({numel}, at::kBFloat16);
  auto buffer = torch::zeros({numel});
  double squares = 0;

  std::vector<Variant> variants = {
      {"AdamW fp32, torch fused", 28, [&] { torchs(b, b.g); }},
      {"AdamW fp32", 28, [&] { ours(a, 1); }, "AdamW fp32, torch fused"},
      {"AdamW bf16, torch: cast, scale, fused, cast", 28,
       [&] {
         buffer.copy_(d.g);
         buffer.mul_(0.5);
         torchs(d, buffer);
         d.copy.copy_(d.p);
       }},
      {"AdamW bf16", 28, [&] { ours(c, 0.5f); }, "AdamW bf16, torch: cast, scale, fused, cast"},
      {"sum of 4 bf16, torch: casts, 3 adds, cast", 10,
       [&] {
         buffer.copy_(tensors[0]);
         for (int i = 1; i < 4; ++i) buffer.add_(tensors[static_cast<std::size_t>(i)].to(at::kFloat));
         sum.copy_(buffer);
       }},
      {"sum of 4 bf16", 10,
       [&] { zero::base::sum_parts(sum.data_ptr(), Dtype::BF16, parts.data(), 4, Dtype::BF16, numel); },
       "sum of 4 bf16, torch: casts, 3 adds, cast"},
      {"square sum fp32, torch: norm in fp32", 4, [&] { squares += a.g.norm().item<double>(); }},
      {"square sum fp32 in fp64", 4,
       [&] { squares += zero::base::sum_of_squares(a.g.const_data_ptr(), Dtype::F32, numel); },
       "square sum fp32, torch: norm in fp32"},
      {"fp32 to bf16, torch copy", 6, [&] { sum.copy_(a.p); }},
      {"fp32 to bf16", 6,
       [&] { zero::base::convert(sum.data_ptr(), Dtype::BF16, a.p.const_data_ptr(), Dtype::F32, numel); },
       "fp32 to bf16, torch copy"},
  };
  for (int round = -1; round < rounds; ++round)
    for (auto& variant : variants) {
      const auto start = std::chrono::steady_clock::now();
      variant.run();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (round >= 0) variant.seconds.push_back(took.count());
    }

  std::printf("%lld elements, %d threads, median of %d rounds, SIMD target %s\n", static_cast<long long>(numel),
              threads, rounds, zero::base::simd_target().c_str());
  std::printf("%-46s %10s %10s %8s %8s\n", "", "ms", "Melem/s", "GB/s", "ratio");
  for (auto& variant : variants) {
    const double seconds = variant.median(), count = static_cast<double>(numel);
    std::printf("%-46s %10.2f %10.0f %8.1f", variant.name, 1e3 * seconds, 1e-6 * count / seconds,
                1e-9 * variant.bytes * count / seconds);
    for (auto& other : variants)
      if (variant.baseline && std::string(variant.baseline) == other.name)
        std::printf(" %8.2f", other.median() / seconds);
    std::printf("\n");
  }
  return squares < 0;  // keeps the sums alive
}
