// The gradient norm of a step in GPU memory: the clipping factor and whether gradients are finite reach the update
// without the host, which reads the sum when everything is enqueued.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "gpu/streams.h"
#include "kernels/cuda/interface.h"

namespace zero::engine {

class DeviceNorm {
 public:
  // [collective] Gathers every rank's `in` to `out` on the current stream.
  using Gather = std::function<void(const at::Tensor& out, const at::Tensor& in)>;

  DeviceNorm(at::Device device, int ranks) : device_(device), ranks_(ranks) {}
  // order: indices of `sums`, as in cuda::Interface::add_sums. tag: must be equal on all ranks, else the norm skips the
  // update.
  void begin(const at::Tensor& sums, const std::vector<int>& order, std::uint64_t tag,
             const cuda::NormSettings& settings, const Gather& gather);
  // Of the last begin(), in device memory.
  const cuda::StepNorm* get() const { return static_cast<const cuda::StepNorm*>(result_.const_data_ptr()); }
  // Each rank's sum of squares, and its tag. Blocks until they are in host memory.
  struct Part {
    double sum;
    std::uint64_t tag;
  };
  std::vector<Part> end();

 private:
  at::Device device_;
  int ranks_;
  at::Tensor mine_, parts_, result_;
  std::unique_ptr<gpu::HostSlots> host_;
  at::Tensor arriving_;
};

}  // namespace zero::engine
