// Speed of the element-wise kernels compared with libtorch's, in one process. Every round runs each variant once, so
// that slow phases of the machine affect all variants; medians are shown. The work is memory bound, so GB/s counts the
// minimum bytes of one pass. `zero bench optimizer` measures the update.
//
//   kernels_bench [elements=33554432] [threads=all] [rounds=15]
#include <omp.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "kernels/elementwise.h"

namespace {

using zero::kernels::Dtype;

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

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t numel = argc > 1 ? std::atoll(argv[1]) : std::int64_t{1} << 25;
  const int threads = argc > 2 ? std::atoi(argv[2]) : omp_get_max_threads(),
            rounds = argc > 3 ? std::atoi(argv[3]) : 15;
  omp_set_num_threads(threads);
  at::set_num_threads(threads);
  at::NoGradGuard no_grad;

  std::vector<at::Tensor> tensors;
  std::vector<const void*> parts;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(torch::randn({numel}).to(at::kBFloat16));
    parts.push_back(tensors.back().const_data_ptr());
  }
  auto sum = torch::zeros({numel}, at::kBFloat16);
  auto buffer = torch::zeros({numel});
  const auto values = torch::randn({numel});
  double squares = 0;

  std::vector<Variant> variants = {
      {"sum of 4 bf16, torch: casts, 3 adds, cast", 10,
       [&] {
         buffer.copy_(tensors[0]);
         for (int i = 1; i < 4; ++i) buffer.add_(tensors[static_cast<std::size_t>(i)].to(at::kFloat));
         sum.copy_(buffer);
       }},
      {"sum of 4 bf16", 10,
       [&] { zero::kernels::sum_parts(sum.data_ptr(), Dtype::BF16, parts.data(), 4, Dtype::BF16, numel); },
       "sum of 4 bf16, torch: casts, 3 adds, cast"},
      {"square sum fp32, torch: norm in fp32", 4, [&] { squares += values.norm().item<double>(); }},
      {"square sum fp32 in fp64", 4,
       [&] { squares += zero::kernels::sum_of_squares(values.const_data_ptr(), Dtype::F32, numel); },
       "square sum fp32, torch: norm in fp32"},
      {"fp32 to bf16, torch copy", 6, [&] { sum.copy_(values); }},
      {"fp32 to bf16", 6,
       [&] { zero::kernels::convert(sum.data_ptr(), Dtype::BF16, values.const_data_ptr(), Dtype::F32, numel); },
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
              threads, rounds, zero::kernels::simd_target().c_str());
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
