// Knowing when a parameter's gradient is final: libtorch's post-accumulate hook, which fires once
// per backward after all contributions are summed, in the thread that called backward (CPU).
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>

namespace zero::torch_hooks {

// One hook per parameter; an empty function removes it. An exception leaves backward() unchanged.
void set_gradient_hook(const at::Tensor& parameter, std::function<void()> hook);
// libtorch has one place for such a hook, and whoever comes last takes it.
enum class HookPlace { Empty, Ours, Foreign };
HookPlace gradient_hook_of(const at::Tensor& parameter);

// Inside such a hook: whether nothing but the parameter's .grad, and autograd on its behalf, has this memory, and all
// of it. Gradients of views often share theirs with each other and with what flows on: AccumulateGrad takes a gradient
// over when its tensor has one owner, and does not ask who else has the storage.
bool owns_storage(const at::Tensor& grad);

}  // namespace zero::torch_hooks
