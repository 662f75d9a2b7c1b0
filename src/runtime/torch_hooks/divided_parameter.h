// The tensor of a parameter of which each rank has a part, and none the values (deepspeed.zero.Init).
#pragma once
#include <ATen/core/Tensor.h>

namespace zero::torch_hooks {

// Of sizes without elements, and of this dtype and device. Operators that read or write it throw ConfigError; those on
// sizes and types, and conversions, run.
at::Tensor divided_parameter(at::IntArrayRef sizes, at::TensorOptions options);

}  // namespace zero::torch_hooks
