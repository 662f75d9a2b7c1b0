// The backward() that calls a hook of autograd: what it reaches, and its end. Call only within such a hook.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>

namespace zero::torch_hooks {

// Whether it adds to the .grad of a parameter, and not only returns a gradient (autograd.grad()).
bool accumulates_into(const at::Tensor& parameter);
// Whether it may run another one inside, whose graph is not known yet: reentrant checkpointing.
bool may_run_another();
// Its number in this process; later ones have higher numbers.
int backward_number();
bool keeps_graph();
bool creates_graph();
// Called when it is complete. If it fails, `call` is only destroyed.
void at_end(std::function<void()> call);

}  // namespace zero::torch_hooks
