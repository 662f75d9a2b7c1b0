#include "engine/device_norm.h"

#include <ATen/ATen.h>

#include <cstring>

#include "engine/tensor_arithmetic.h"
#include "gpu/plugin.h"

namespace zero::engine {

void DeviceNorm::begin(const at::Tensor& sums, const std::vector<int>& order, std::uint64_t tag,
                       const cuda::NormSettings& settings, const Gather& gather) {
  const auto doubles = at::TensorOptions().dtype(at::kDouble).device(device_);
  if (!mine_.defined()) {
    mine_ = at::empty({2}, doubles);
    parts_ = ranks_ == 1 ? mine_ : at::empty({2 * ranks_}, doubles);
    result_ = at::empty({static_cast<std::int64_t>(sizeof(cuda::StepNorm))}, doubles.dtype(at::kByte));
    host_ = std::make_unique<gpu::HostSlots>(device_, static_cast<std::int64_t>(parts_.nbytes()), 1);
  }
  const auto& kernels = *kernels_for(device_);
  const auto place = place_on(device_);
  cuda::check(kernels.add_sums(place, sums.const_data_ptr<double>(), order.data(), static_cast<int>(order.size()), tag,
                               mine_.mutable_data_ptr<double>()),
              "add_sums");
  if (ranks_ > 1) gather(parts_, mine_);
  cuda::check(kernels.step_norm(place, parts_.const_data_ptr<double>(), ranks_, settings,
                                static_cast<cuda::StepNorm*>(result_.mutable_data_ptr())),
              "step_norm");
  arriving_ = host_->take(static_cast<std::int64_t>(parts_.nbytes())).view(at::kDouble);
  arriving_.copy_(parts_, /*non_blocking=*/true);
  host_->used();
}

std::vector<DeviceNorm::Part> DeviceNorm::end() {
  host_->take(static_cast<std::int64_t>(arriving_.nbytes()));  // blocks until the copy is complete
  std::vector<Part> parts(static_cast<std::size_t>(ranks_));
  static_assert(sizeof(Part) == 2 * sizeof(double));
  std::memcpy(parts.data(), arriving_.const_data_ptr(), arriving_.nbytes());
  return parts;
}

}  // namespace zero::engine
