// Element-wise arithmetic on tensors: kernels/elementwise.h for host memory, the plug-in's kernels for a GPU, with
// identical bits. On a GPU the work is enqueued on the current stream and does not block the host. Does not know of
// groups, stages or communication.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
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

// Consecutive elements of a contiguous fp32, bf16 or fp16 tensor. The caller keeps it alive until the work is enqueued.
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

// The kernels for a device's memory; null for host memory, which kernels/elementwise.h handles. ConfigError for an
// unusable GPU.
const cuda::Interface* kernels_for(at::Device device);
// The device's current stream.
cuda::Place place_on(at::Device device);
// For tests without a GPU: host memory is handled by these kernels, as a GPU's would be. null: restores the default.
void serve_host_memory_by(const cuda::Interface* kernels);

// As in kernels/elementwise.h. Equal numel, same device.
void convert(const Stretch& to, const Stretch& from);
void accumulate(const Stretch& to, const Stretch& from);
void scale(const Stretch& data, float factor);

// Page-locked host memory for copies to and from the device, exactly as large as asked for; kByte. Freed when no copy
// uses it. ConfigError (kOutOfMemory) if the system has none.
at::Tensor pinned_memory(at::Device device, std::int64_t bytes);

// The function that ShardedOptimizer calls for spans on this device; null if it handles them itself.
// norm: where the device's norm is, for updates without a factor.
optim::ShardedOptimizer::RangesUpdate ranges_update_on(at::Device device, std::function<const cuda::StepNorm*()> norm);

// Sums of squares that GPU kernels leave in device memory. One launch computes those of many vectors, and the host
// reads all of them with one wait per norm.
class DeviceSums {
 public:
  // Room for `count` sums.
  DeviceSums(at::Device device, int count) : device_(device), count_(count) {}
  // Notes sums[index] <- sum_of_squares(values), in place of what was noted for this index.
  void add(int index, const Stretch& values) { noted_.insert_or_assign(index, values); }
  void cancel(int index) { noted_.erase(index); }
  // Enqueues what was noted; until then the values do not change. Returns the sums by index, in device memory.
  const at::Tensor& enqueue();
  // Enqueues it and blocks until all sums are in host memory.
  void fetch();
  double operator[](int index) const { return values_[static_cast<std::size_t>(index)]; }

 private:
  at::Device device_;
  int count_;
  std::map<int, Stretch> noted_;
  at::Tensor sums_;
  std::vector<double> values_;
  std::unique_ptr<gpu::HostSlots> host_;
};

// Current and peak bytes of a GPU's caching allocator in this process; empty for the CPU.
std::optional<MemoryReport::Allocator> allocator_report(at::Device device);
void reset_allocator_peak(at::Device device);

}  // namespace zero::engine
