// Element-wise parts of the models in one pass over memory on a CPU, in fp32 and bf16: libtorch has no kernels for
// them, and one operator after the other takes several times as long. Elsewhere they are libtorch's operators.
// Results are rounded where transformers' operators round, one after the other; gradients in bf16 less often. Products
// are not contracted with sums, and sums have one order: processors with and without FMA give the same bits, except for
// the last sum of a norm weight's gradient, which is libtorch's. Not twice differentiable on a CPU.
#pragma once
#include <ATen/core/Tensor.h>

namespace models {

// weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, in fp32, rounded to the weight's dtype before the
// product with the weight [width] (Zhang and Sennrich, 1910.07467). The result has the narrower dtype of the two, x's
// if they have one width.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon);

// x cos + (-x2, x1) sin, where x1 and x2 are the halves of x along its last dimension. x: [batch, heads, time, width];
// cos, sin: [time, width] or [batch, time, width], of x's dtype, their two halves equal. Throws c10::Error for other
// shapes.
at::Tensor rotate_halves(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

// silu(gate) * up, of one shape. Throws c10::Error for two.
at::Tensor gated_silu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace models
