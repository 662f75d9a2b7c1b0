// See quantized_reduce.h.
#include "comm/quantized_reduce.h"

#include <ATen/ops/empty.h>

namespace zero::comm {

QuantizedSum::QuantizedSum(std::vector<int> ranks, std::size_t own, std::int64_t numel, int bits)
    : ranks_(std::move(ranks)), own_(own), numel_(numel), bits_(bits) {
  const std::vector<std::int64_t> rows{static_cast<std::int64_t>(ranks_.size()), kernels::quantized_bytes(numel, bits)};
  sent_ = at::empty(rows, at::kByte);
  received_ = at::empty(rows, at::kByte);
}

void QuantizedSum::post(MessageWork& work, const std::vector<const void*>& parts, kernels::Dtype dtype) {
  const auto row = [](const at::Tensor& rows, std::size_t i) { return rows[static_cast<std::int64_t>(i)]; };
  for (std::size_t i = 0; i < ranks_.size(); ++i)
    if (i != own_) work.receive(ranks_[i], row(received_, i));
  for (std::size_t step = 1; step < ranks_.size(); ++step) {
    const auto i = (own_ + step) % ranks_.size();
    const auto to = row(sent_, i);
    kernels::quantize(to.mutable_data_ptr(), bits_, parts[i], dtype, numel_);
    work.send(ranks_[i], to);
  }
}

void QuantizedSum::finish(void* out, kernels::Dtype out_dtype, const void* own, kernels::Dtype own_dtype) const {
  auto sum = at::zeros({numel_}, at::kFloat);
  auto* const total = static_cast<float*>(sum.mutable_data_ptr());
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (i == own_)
      kernels::accumulate(total, kernels::Dtype::F32, own, own_dtype, numel_);
    else
      kernels::add_dequantized(total, received_[static_cast<std::int64_t>(i)].const_data_ptr(), bits_, numel_);
  }
  kernels::convert(out, out_dtype, total, kernels::Dtype::F32, numel_);
}

}  // namespace zero::comm
