// Reports when a parameter's gradient is complete, by libtorch's post-accumulate hook. It is called once per backward,
// after all contributions are summed, in the thread that called backward (on the CPU).
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>

namespace zero::torch_hooks {

// One hook per parameter; an empty function removes it. Exceptions propagate through backward() unchanged.
void set_gradient_hook(const at::Tensor& parameter, std::function<void()> hook);
// libtorch stores one such hook per parameter; the last one set wins.
enum class HookPlace { Empty, Ours, Foreign };
HookPlace gradient_hook_of(const at::Tensor& parameter);

// Inside such a hook: whether only the parameter's .grad uses this memory, and all of it. Gradients of views often
// share their storage: AccumulateGrad takes over a gradient tensor that has one owner, without checking who else uses
// the storage.
bool owns_storage(const at::Tensor& grad);

}  // namespace zero::torch_hooks
