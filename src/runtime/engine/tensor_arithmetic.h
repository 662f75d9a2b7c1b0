// Element-wise arithmetic on tensors where they lie: kernels/elementwise.h in host memory, the plug-in's kernels on a
// GPU, with the same bits. On a GPU the work is put on the current stream, and nobody waits for it. No groups, no
// stages, no communication here.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <zero/memory_report.h>

#include "engine/dtypes.h"
#include "gpu/streams.h"
#include "kernels/cuda/interface.h"
#include "kernels/elementwise.h"
#include "optim/sharded_optimizer.h"

namespace zero::engine {

// Consecutive elements of a contiguous fp32, bf16 or fp16 tensor, which the caller keeps alive until the work is on
// the stream.
struct Stretch {
  explicit Stretch(const at::Tensor& tensor) : Stretch(tensor, 0, tensor.numel()) {}
  Stretch(const at::Tensor& tensor, std::int64_t begin, std::int64_t count)
      : data(static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())) +
             begin * static_cast<std::int64_t>(tensor.element_size())),
        numel(count),
        dtype(dtype_of(tensor.scalar_type())),
        device(tensor.device()) {}
  Stretch(void* data, std::int64_t numel, kernels::Dtype dtype, at::Device device)
      : data(data), numel(numel), dtype(dtype), device(device) {}
  void* data;
  std::int64_t numel;
  kernels::Dtype dtype;
  at::Device device;
};

// The kernels that serve a device's memory; null where kernels/elementwise.h does: host memory. ConfigError for a GPU
// that cannot be used.
const cuda::Interface* kernels_for(at::Device device);
// For tests on machines without a GPU: from now on host memory is served by these, as a GPU's is; null: as before.
void serve_host_memory_by(const cuda::Interface* kernels);

// As in kernels/elementwise.h; equal numel, one device.
void convert(const Stretch& to, const Stretch& from);
void accumulate(const Stretch& to, const Stretch& from);
void scale(const Stretch& data, float factor);

// What ShardedOptimizer is to call for spans on this device; null where it serves them itself.
optim::ShardedOptimizer::RangeUpdate range_update_on(at::Device device);

// Sums of squares that a GPU's kernels leave in its memory, read by the host all at once: one wait for a norm.
class DeviceSums {
 public:
  // Room for `count` sums.
  DeviceSums(at::Device device, int count) : device_(device), count_(count) {}
  // sums[index] <- base::sum_of_squares(values), later.
  void add(int index, const Stretch& values);
  // The host waits for what was added.
  void fetch();
  double operator[](int index) const { return values_[static_cast<std::size_t>(index)]; }

 private:
  at::Device device_;
  int count_;
  at::Tensor sums_;
  std::vector<double> values_;
  std::unique_ptr<gpu::HostSlots> host_;
};

// What the caching allocator of a GPU holds and held at most, for this process; empty for the CPU.
std::optional<MemoryReport::Allocator> allocator_report(at::Device device);
void reset_allocator_peak(at::Device device);

}  // namespace zero::engine
