// The host and GPU implementation of every operation, and the transfer of norms to the host.
#include "engine/tensor_arithmetic.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <atomic>

#include "base/check.h"
#include "gpu/plugin.h"

namespace zero::engine {
namespace {

std::atomic<const cuda::Interface*> host_kernels{nullptr};

void check_same(const char* what, const Stretch& a, const Stretch& b) {
  ZERO_CHECK(a.numel == b.numel && a.device == b.device, "[engine::", what, "] got ", a.numel, " elements on ",
             a.device.str(), " and ", b.numel, " on ", b.device.str());
}

}  // namespace

cuda::Place place_on(at::Device device) { return {device.index(), gpu::native_stream(device)}; }

const cuda::Interface* kernels_for(at::Device device) {
  return device.is_cpu() ? host_kernels.load(std::memory_order_relaxed) : &cuda::interface("[Engine]");
}

void serve_host_memory_by(const cuda::Interface* kernels) { host_kernels = kernels; }

void convert(const Stretch& to, const Stretch& from) {
  check_same("convert", to, from);
  const auto* kernels = kernels_for(to.device);
  if (kernels == nullptr) return kernels::convert(to.data, to.dtype, from.data, from.dtype, to.numel);
  cuda::check(kernels->convert(place_on(to.device), to.data, to.dtype, from.data, from.dtype, to.numel), "convert");
}

void accumulate(const Stretch& to, const Stretch& from) {
  check_same("accumulate", to, from);
  const auto* kernels = kernels_for(to.device);
  if (kernels == nullptr) return kernels::accumulate(to.data, to.dtype, from.data, from.dtype, to.numel);
  cuda::check(kernels->accumulate(place_on(to.device), to.data, to.dtype, from.data, from.dtype, to.numel),
              "accumulate");
}

void scale(const Stretch& data, float factor) {
  const auto* kernels = kernels_for(data.device);
  if (kernels == nullptr) return kernels::scale(data.data, data.dtype, factor, data.numel);
  cuda::check(kernels->scale(place_on(data.device), data.data, data.dtype, factor, data.numel), "scale");
}

at::Tensor pinned_memory(at::Device device, std::int64_t bytes) {
  if (bytes == 0) return at::empty({0}, at::kByte);
  const auto& kernels = *kernels_for(device);
  const auto size = static_cast<std::size_t>(bytes);
  void* data = nullptr;
  if (const int status = kernels.allocate_host(device.index(), size, &data); status != 0)
    throw ConfigError(base::join("[Engine] got '", kernels.error_text(status), "' for ", bytes,
                                 " bytes of pinned host memory, expected to have them. Hint: pin_memory false, or "
                                 "offload to a file."),
                      ExitCode::kOutOfMemory);
  return at::from_blob(
      data, {bytes}, [&kernels, device, size](void* memory) { kernels.free_host(device.index(), memory, size); },
      at::TensorOptions().dtype(at::kByte));
}

optim::ShardedOptimizer::RangesUpdate ranges_update_on(at::Device device, std::function<const cuda::StepNorm*()> norm) {
  const auto* kernels = kernels_for(device);
  if (kernels == nullptr) return nullptr;
  return
      [device, kernels, norm = std::move(norm)](const kernels::UpdateConstants& constants, std::optional<float> factor,
                                                std::span<const kernels::SizedRange> ranges) {
        const auto count = static_cast<int>(ranges.size());
        const auto place = place_on(device);
        cuda::check(factor ? kernels->update(place, &constants, *factor, ranges.data(), count)
                           : kernels->update_by_norm(place, &constants, norm(), ranges.data(), count),
                    "update");
      };
}

const at::Tensor& DeviceSums::enqueue() {
  const auto options = at::TensorOptions().dtype(at::kDouble).device(device_);
  if (!sums_.defined()) sums_ = at::zeros({count_}, options);
  if (noted_.empty()) return sums_;
  std::vector<cuda::SquaredVector> vectors;
  std::int64_t num_pieces = 0;
  for (const auto& [index, values] : noted_) {
    vectors.push_back({values.data, values.dtype, values.numel, sums_.mutable_data_ptr<double>() + index});
    num_pieces += cuda::square_pieces(values.numel);
  }
  // Freed on return; the caching allocator reuses it only for later work of the same stream.
  auto pieces = at::empty({num_pieces}, options);
  cuda::check(kernels_for(device_)->sums_of_squares(place_on(device_), vectors.data(), static_cast<int>(vectors.size()),
                                                    pieces.mutable_data_ptr<double>()),
              "sums_of_squares");
  noted_.clear();
  return sums_;
}

void DeviceSums::fetch() {
  enqueue();
  values_.assign(static_cast<std::size_t>(count_), 0.0);
  const auto bytes = static_cast<std::int64_t>(sums_.nbytes());
  if (!host_) host_ = std::make_unique<gpu::HostSlots>(device_, bytes, 1);
  auto host = host_->take(bytes).view(at::kDouble);
  host.copy_(sums_, /*non_blocking=*/true);
  host_->used();
  host_->take(bytes);  // blocks until the copy is complete
  std::copy_n(host.const_data_ptr<double>(), count_, values_.begin());
}

std::optional<MemoryReport::Allocator> allocator_report(at::Device device) {
  if (device.is_cpu()) return std::nullopt;
  const auto stats = at::accelerator::getDeviceStats(device.index());
  const auto bytes = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
  return MemoryReport::Allocator{bytes(stats.allocated_bytes[0].current), bytes(stats.allocated_bytes[0].peak),
                                 bytes(stats.reserved_bytes[0].current), bytes(stats.reserved_bytes[0].peak),
                                 stats.num_alloc_retries};
}

void reset_allocator_peak(at::Device device) {
  if (!device.is_cpu()) at::accelerator::resetPeakStats(device.index());
}

}  // namespace zero::engine
