// See fused.h: the functions and their gradients, as autograd functions that cut the loops of fused_loops.h into the
// threads' shares.
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>

#include "models/fused.h"
#include "models/fused_loops.h"

namespace models {
namespace {

bool fusible(const at::Tensor& x) {
  return x.is_cpu() && (x.scalar_type() == torch::kFloat32 || x.scalar_type() == torch::kBFloat16);
}

template <class T>
const T* in(const at::Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}
template <class T>
T* out(at::Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}
// Calls f(T()) with the type of x's elements.
template <class F>
void by_type(const at::Tensor& x, const F& f) {
  x.scalar_type() == torch::kFloat32 ? f(float()) : f(fused_loops::Half16());
}
// A thread's share is at least 2^14 elements.
std::int64_t grain(std::int64_t width) {
  return std::max<std::int64_t>(1, (1 << 14) / std::max<std::int64_t>(1, width));
}

// Through the dispatcher, which knows where a sharded parameter is.
at::Tensor wide_copy(const at::Tensor& weight) { return weight.to(torch::kFloat32, false, /*copy=*/true).contiguous(); }

class RmsNormPass : public torch::autograd::Function<RmsNormPass> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, double epsilon) {
    const at::Tensor x = input.contiguous(), w = wide_copy(weight);
    const std::int64_t width = x.size(-1), rows = x.numel() / std::max<std::int64_t>(1, width);
    at::Tensor y = at::empty_like(x), scales = at::empty({rows}, w.options());
    by_type(x, [&]<class T>(T) {
      at::parallel_for(0, rows, grain(width), [&](std::int64_t begin, std::int64_t end) {
        fused_loops::norm(in<T>(x) + begin * width, in<float>(w), out<T>(y) + begin * width, out<float>(scales) + begin,
                          end - begin, width, static_cast<float>(epsilon));
      });
    });
    context->save_for_backward({x, weight, scales});
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &scales = saved[2];
    const at::Tensor w = wide_copy(saved[1]), dy = grads[0].contiguous();
    const std::int64_t width = x.size(-1), rows = scales.numel();
    // The weight's gradient is summed in parts of as many rows, whatever the number of threads.
    constexpr std::int64_t kPart = 256;
    const std::int64_t parts = (rows + kPart - 1) / kPart;
    at::Tensor dx = at::empty_like(x), dw = at::zeros({parts, width}, w.options());
    by_type(x, [&]<class T>(T) {
      at::parallel_for(0, parts, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t part = begin; part < end; ++part) {
          const std::int64_t first = part * kPart, count = std::min(kPart, rows - first);
          fused_loops::norm_backward(in<T>(dy) + first * width, in<T>(x) + first * width, in<float>(w),
                                     in<float>(scales) + first, out<T>(dx) + first * width,
                                     out<float>(dw) + part * width, count, width);
        }
      });
    });
    return {dx, dw.sum(0).to(saved[1].scalar_type()), at::Tensor()};
  }
};

// x: [batch, time, heads, width] in memory, seen as [batch, heads, time, width].
at::Tensor turned_by(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, float sign) {
  const at::Tensor ordered = x.transpose(1, 2).contiguous(), c = cos.contiguous(), s = sin.contiguous();
  const std::int64_t time = ordered.size(1), heads = ordered.size(2), width = ordered.size(3);
  const bool batched = cos.dim() == 3;
  at::Tensor y = at::empty_like(ordered);
  by_type(x, [&]<class T>(T) {
    at::parallel_for(0, ordered.size(0) * time, grain(heads * width), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t angle = (batched ? row : row % time) * width, at = row * heads * width;
        fused_loops::turned(in<T>(ordered) + at, in<T>(c) + angle, in<T>(s) + angle, out<T>(y) + at, heads, width,
                            sign);
      }
    });
  });
  return y.transpose(1, 2);
}

class RotatePass : public torch::autograd::Function<RotatePass> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin) {
    context->save_for_backward({cos, sin});
    return turned_by(x, cos, sin, 1);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    return {turned_by(grads[0], saved[0], saved[1], -1), at::Tensor(), at::Tensor()};
  }
};

class GatePass : public torch::autograd::Function<GatePass> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    const at::Tensor g = gate.contiguous(), u = up.contiguous();
    context->save_for_backward({g, u});
    at::Tensor y = at::empty_like(g);
    by_type(g, [&]<class T>(T) {
      at::parallel_for(0, g.numel(), grain(1), [&](std::int64_t begin, std::int64_t end) {
        fused_loops::gated(in<T>(g) + begin, in<T>(u) + begin, out<T>(y) + begin, end - begin);
      });
    });
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &g = saved[0], &u = saved[1], dy = grads[0].contiguous();
    at::Tensor dg = at::empty_like(g), du = at::empty_like(u);
    by_type(g, [&]<class T>(T) {
      at::parallel_for(0, g.numel(), grain(1), [&](std::int64_t begin, std::int64_t end) {
        fused_loops::gated_backward(in<T>(dy) + begin, in<T>(g) + begin, in<T>(u) + begin, out<T>(dg) + begin,
                                    out<T>(du) + begin, end - begin);
      });
    });
    return {dg, du};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {
  TORCH_CHECK(weight.dim() == 1 && x.dim() >= 1 && x.size(-1) == weight.size(0), "[rms_norm] got x ", x.sizes(),
              " and weight ", weight.sizes(), ", expected [.., width] and [width]");
  if (fusible(x) && x.scalar_type() == weight.scalar_type()) return RmsNormPass::apply(x, weight, epsilon);
  const at::Tensor wide = x.to(torch::kFloat32);
  const at::Tensor scale = (wide.square().mean(-1, true) + epsilon).rsqrt();
  const auto narrower = weight.element_size() < x.element_size() ? weight.scalar_type() : x.scalar_type();
  return (weight * (wide * scale).to(weight.scalar_type())).to(narrower);
}

at::Tensor rotate_halves(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto dims = cos.dim();
  const bool fits = x.dim() == 4 && x.size(3) % 2 == 0 && (dims == 2 || (dims == 3 && cos.size(0) == x.size(0))) &&
                    cos.size(dims - 2) == x.size(2) && cos.size(dims - 1) == x.size(3) && cos.sizes() == sin.sizes() &&
                    cos.scalar_type() == sin.scalar_type();
  TORCH_CHECK(fits, "[rotate_halves] got x ", x.sizes(), ", cos ", cos.sizes(), " and sin ", sin.sizes(),
              ", expected [batch, heads, time, even width] and [time, width] or [batch, time, width] of one dtype");
  if (fusible(x) && cos.scalar_type() == x.scalar_type()) return RotatePass::apply(x, cos, sin);
  const auto halves = x.chunk(2, -1);
  const bool batched = cos.dim() == 3;  // then there is no dimension of heads yet
  const at::Tensor turned = torch::cat({-halves[1], halves[0]}, -1);
  return x * (batched ? cos.unsqueeze(1) : cos) + turned * (batched ? sin.unsqueeze(1) : sin);
}

at::Tensor gated_silu(const at::Tensor& gate, const at::Tensor& up) {
  TORCH_CHECK(gate.sizes() == up.sizes(), "[gated_silu] got gate ", gate.sizes(), " and up ", up.sizes(),
              ", expected one shape");
  if (fusible(gate) && gate.scalar_type() == up.scalar_type()) return GatePass::apply(gate, up);
  return torch::silu(gate) * up;
}

}  // namespace models
