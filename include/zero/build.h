// Builds a module without allocating its parameters. The Engine materializes one at a time, so a rank holds at most its
// shards and one whole parameter, or those whose initializers run in turns and depend on earlier values. Values are
// bit-identical to an eager build with the same torch::manual_seed.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include <zero/export.h>
#include <zero/options.h>

namespace zero {
namespace detail {
// RAII guard: parameters created in this thread get no memory, and their initializers are recorded.
class ZERO_API DeferredScope {
 public:
  explicit DeferredScope(c10::Device device = c10::kCPU);
  ~DeferredScope();
  DeferredScope(const DeferredScope&) = delete;
  DeferredScope& operator=(const DeferredScope&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};
}  // namespace detail

// Calls make() with deferred allocation and returns its result: a std::shared_ptr to the module, or a module holder.
// The module cannot run before an Engine is constructed from it. Local. Exceptions of make() propagate.
//
// device: where the Engine puts the model, as model->to(device) would, for example zero::default_device(*comm). make()
// itself creates tensors on the CPU, and values are drawn there, one parameter at a time: they are those of an eager
// build on the CPU. The GPU never holds the whole model in fp32, and host memory only if make() reads what it builds.
// Buffers and parameters that make() created with values are moved, too. ConfigError for another kind of device.
template <class Make>
auto build(Make&& make, c10::Device device = c10::kCPU) {
  detail::DeferredScope scope(device);
  return std::forward<Make>(make)();
}
template <class Make>
[[deprecated("the options have no part in it: build(make)")]] auto build(const Options&, Make&& make) {
  return build(std::forward<Make>(make));
}

// A tensor without memory, for the data of a parameter whose values are elsewhere, such as in parts on the ranks. The
// Engine that takes the parameter calls fill(tensor), which writes all values to a tensor in host memory, of these
// sizes and dtype. It asks for one parameter at a time, in the order of `place`: fill may be collective if all ranks
// have the same places. device: as for build(). [local] Until then it cannot be read.
ZERO_API at::Tensor deferred_values(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device, std::int64_t place,
                                    std::function<void(const at::Tensor&)> fill);
// [local] The data of a parameter until then: of `sizes`, one of which is 0, and the dtype and device of `like`.
// ConfigError by any operator that reads or writes it.
ZERO_API at::Tensor divided_parameter(const at::Tensor& like, at::IntArrayRef sizes);

}  // namespace zero
