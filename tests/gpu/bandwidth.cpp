// Memory bandwidth of the plug-in's kernels on this GPU, compared with a plain copy and libtorch's fused AdamW: of one
// vector of several sizes, and of the 148 parameters of GPT-2 (124M) in one call, as in a training step. Writes
// one JSON document to standard output; bytes are those that a kernel must read and write. Run by script/gpu-check.
// Does not check results.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <tuple>
#include <vector>

#include "gpu/plugin.h"
#include "gpu/streams.h"

namespace {

using zero::kernels::Dtype;
namespace cuda = zero::cuda;
namespace kernels = zero::kernels;

const at::Device kGpu(at::kCUDA, 0);

// Median seconds of one call, of 15 after 3.
double seconds_of(const std::function<void()>& call) {
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  std::vector<double> all;
  for (int k = 0; k < 18; ++k) {
    c10::Event begin(at::kCUDA, c10::EventFlag::BACKEND_DEFAULT), end(at::kCUDA, c10::EventFlag::BACKEND_DEFAULT);
    begin.record(guard.getStream(kGpu));
    call();
    end.record(guard.getStream(kGpu));
    end.synchronize();
    if (k >= 3) all.push_back(begin.elapsedTime(end) * 1e-3);
  }
  std::nth_element(all.begin(), all.begin() + 7, all.end());
  return all[7];
}

bool first_line = true;
void report(const char* what, std::int64_t numel, double bytes_per_element, const std::function<void()>& call) {
  const double seconds = seconds_of(call), bytes = bytes_per_element * static_cast<double>(numel);
  std::printf("%s\n    {\"what\": \"%s\", \"elements\": %lld, \"seconds\": %.9g, \"gb_per_s\": %.1f}",
              first_line ? "" : ",", what, static_cast<long long>(numel), seconds, bytes / seconds * 1e-9);
  first_line = false;
}

kernels::UpdateConstants adamw() {
  kernels::UpdateConstants c{};
  c.rule = kernels::Rule::AdamDecoupled;
  c.keep = 0.999f;
  c.beta1 = 0.9f;
  c.beta2 = 0.999f;
  c.new1 = 0.1f;
  c.new2 = 0.001f;
  c.root2 = 0.5f;
  c.eps = 1e-8f;
  c.negative_step = -1e-3f;
  return c;
}

std::vector<std::int64_t> gpt2_numels() {
  constexpr std::int64_t kHidden = 768;
  std::vector<std::int64_t> numels{50257 * kHidden, 1024 * kHidden, kHidden, kHidden};
  for (int layer = 0; layer < 12; ++layer)
    for (const std::int64_t numel :
         std::initializer_list<std::int64_t>{1, 1, 3 * kHidden, 3, kHidden, 1, 1, 1, 4 * kHidden, 4, 4 * kHidden, 1})
      numels.push_back(numel * kHidden);
  return numels;
}

void report_gpt2(const cuda::Interface& kernels) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(kGpu);
  const cuda::Place place{0, zero::gpu::native_stream(kGpu)};
  std::vector<at::Tensor> p, m, v, g, g16, p16;
  std::vector<kernels::SizedRange> ranges;
  std::vector<cuda::SquaredVector> vectors;
  const auto numels = gpt2_numels();
  auto sums = at::empty({static_cast<std::int64_t>(numels.size())}, options.dtype(at::kDouble));
  std::int64_t all = 0, num_pieces = 0;
  for (const auto numel : numels) {
    p.push_back(at::randn({numel}, options));
    m.push_back(at::zeros({numel}, options));
    v.push_back(at::ones({numel}, options));
    g.push_back(at::randn({numel}, options));
    g16.push_back(g.back().to(at::kBFloat16));
    p16.push_back(p.back().to(at::kBFloat16));
    vectors.push_back({g16.back().data_ptr(), Dtype::BF16, numel, sums.data_ptr<double>() + ranges.size()});
    ranges.push_back({{p.back().data_ptr<float>(),
                       {m.back().data_ptr<float>(), v.back().data_ptr<float>()},
                       g16.back().data_ptr(),
                       Dtype::BF16,
                       p16.back().data_ptr(),
                       Dtype::BF16},
                      numel});
    all += numel;
    num_pieces += cuda::square_pieces(numel);
  }
  auto pieces = at::empty({num_pieces}, options.dtype(at::kDouble));
  const auto c = adamw();
  const auto count = static_cast<int>(ranges.size());
  report("gpt2_adamw_bf16_master", all, 28,
         [&] { cuda::check(kernels.update(place, &c, 0.5f, ranges.data(), count), "update"); });
  report("gpt2_sums_of_squares_bf16", all, 2, [&] {
    cuda::check(kernels.sums_of_squares(place, vectors.data(), count, pieces.data_ptr<double>()), "sums_of_squares");
  });
  std::vector<at::Tensor> counts(numels.size(), at::ones({}, options));
  for (auto& each : counts) each = each.clone();
  report("gpt2_torch_fused_adamw_fp32", all, 28,
         [&] { at::_fused_adamw_(p, g, m, v, {}, counts, 1e-3, 0.9, 0.999, 0.01, 1e-8, false, false); });
  report("gpt2_torch_foreach_norm_bf16", all, 2, [&] { at::stack(at::_foreach_norm(g16)).norm(); });
}

}  // namespace

int main() {
  const auto& plugin = cuda::plugin();
  if (plugin.interface == nullptr) {
    std::printf("{\"skipped\": \"%s\"}\n", plugin.reason.c_str());
    return 0;
  }
  const auto& kernels = *plugin.interface;
  at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(at::kFloat).device(kGpu);
  std::printf("{\"kernels\": [");
  for (const std::int64_t numel : {std::int64_t{1} << 20, std::int64_t{1} << 24, std::int64_t{1} << 28}) {
    auto p = at::randn({numel}, options), m = at::zeros({numel}, options), v = at::ones({numel}, options),
         g = at::randn({numel}, options), half = g.to(at::kBFloat16), copy = at::empty_like(half);
    const cuda::Place place{0, zero::gpu::native_stream(kGpu)};
    const auto c = adamw();
    const auto update = [&](const at::Tensor& gradient, Dtype dtype, void* parameter) {
      const kernels::UpdateRange range{p.data_ptr<float>(), {m.data_ptr<float>(), v.data_ptr<float>()},
                                       gradient.data_ptr(), dtype,
                                       parameter,           Dtype::BF16};
      const kernels::SizedRange sized{range, numel};
      cuda::check(kernels.update(place, &c, 0.5f, &sized, 1), "update");
    };
    report("copy_fp32", numel, 8, [&] { m.copy_(g); });
    m.zero_();
    report("adamw_fp32", numel, 28, [&] { update(g, Dtype::F32, nullptr); });
    report("adamw_bf16_master", numel, 28, [&] { update(half, Dtype::BF16, copy.data_ptr()); });
    auto count = at::ones({}, options);
    report("torch_fused_adamw_fp32", numel, 28,
           [&] { at::_fused_adamw_({p}, {g}, {m}, {v}, {}, {count}, 1e-3, 0.9, 0.999, 0.01, 1e-8, false, false); });
    report("convert_fp32_to_bf16", numel, 6, [&] {
      cuda::check(kernels.convert(place, copy.data_ptr(), Dtype::BF16, g.data_ptr(), Dtype::F32, numel), "convert");
    });
    report("accumulate_bf16_into_fp32", numel, 10, [&] {
      cuda::check(kernels.accumulate(place, m.data_ptr(), Dtype::F32, half.data_ptr(), Dtype::BF16, numel), "add");
    });
    report("scale_fp32", numel, 8,
           [&] { cuda::check(kernels.scale(place, v.data_ptr(), Dtype::F32, 1.0000001f, numel), "scale"); });
    auto pieces = at::empty({cuda::square_pieces(numel) + 2}, options.dtype(at::kDouble));
    for (const auto& [name, values, dtype] :
         {std::tuple{"sum_of_squares_fp32", g, Dtype::F32}, {"sum_of_squares_bf16", half, Dtype::BF16}}) {
      report(name, numel, static_cast<double>(zero::kernels::size_of(dtype)),
             [&, dtype = dtype, data = values.data_ptr()] {
               const cuda::SquaredVector vector{data, dtype, numel, pieces.data_ptr<double>()};
               cuda::check(kernels.sums_of_squares(place, &vector, 1, pieces.data_ptr<double>() + 1),
                           "sums_of_squares");
             });
    }
    report("torch_norm_fp32", numel, 4, [&] { at::norm(g); });
  }
  report_gpt2(kernels);
  std::printf("\n]}\n");
  return 0;
}
