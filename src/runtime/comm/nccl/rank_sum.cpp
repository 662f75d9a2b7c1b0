// See rank_sum.h.
#include "comm/nccl/rank_sum.h"

#include <ATen/ATen.h>

#include "comm/collective_call.h"
#include "gpu/plugin.h"
#include "gpu/streams.h"

namespace zero::comm::nccl {

void sum_in_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, int most) {
  if (out.numel() == 0) return;
  const auto& kernels = cuda::interface("[comm::nccl]");
  const cuda::Place place{out.device().index(), gpu::native_stream(out.device())};
  const auto dtype = sum_dtype(out.scalar_type());
  const auto numel = out.numel();
  auto* const result = out.mutable_data_ptr();
  if (parts.size() <= static_cast<std::size_t>(most)) {
    std::vector<const void*> data;
    for (const auto& part : parts) data.push_back(part.const_data_ptr());
    return cuda::check(
        kernels.sum_parts(place, result, dtype, data.data(), static_cast<int>(data.size()), dtype, numel), "sum_parts");
  }
  const auto sum = at::empty({numel}, out.options().dtype(at::kFloat));
  auto* const sums = sum.mutable_data_ptr();
  cuda::check(kernels.convert(place, sums, kernels::Dtype::F32, parts[0].const_data_ptr(), dtype, numel), "convert");
  for (std::size_t p = 1; p < parts.size(); ++p)
    cuda::check(kernels.accumulate(place, sums, kernels::Dtype::F32, parts[p].const_data_ptr(), dtype, numel),
                "accumulate");
  cuda::check(kernels.convert(place, result, dtype, sums, kernels::Dtype::F32, numel), "convert");
}

}  // namespace zero::comm::nccl
