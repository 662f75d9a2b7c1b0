// See fused.h. The loops are plain C++ that the compiler vectorizes for several kinds of processors. Build with
// -ffp-contract=off: of the three clones, two would have fused multiply-adds, the default one not.
#include "models/fused.h"

#include <torch/torch.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define MODELS_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3")))
#else
#define MODELS_CLONES
#endif
#define MODELS_INLINE inline __attribute__((always_inline))

namespace models {
namespace {

// bf16 as its bits.
using Half16 = std::uint16_t;

MODELS_INLINE float wide(float x) { return x; }
MODELS_INLINE float wide(Half16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16); }
template <class T>
MODELS_INLINE T narrow(float x);
template <>
MODELS_INLINE float narrow<float>(float x) {
  return x;
}
template <>
MODELS_INLINE Half16 narrow<Half16>(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<Half16>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
template <class T>
MODELS_INLINE float rounded(float x) {
  return wide(narrow<T>(x));
}

// exp(x) to 2 units in the last place: 2^n times a polynomial (Cody and Waite's reduction; coefficients of Cephes).
MODELS_INLINE float exponential(float x) {
  x = std::min(std::max(x, -87.3f), 88.3f);
  const float magic = 12582912.0f;  // adding it rounds to an integer
  const float n = (x * 1.44269504088896341f + magic) - magic;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * std::bit_cast<float>((static_cast<std::int32_t>(n) + 127) << 23);
}

constexpr std::int64_t kLanes = 16;

template <class T>
MODELS_INLINE float dot(const T* a, const T* b, const float* weight, std::int64_t width) {
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (std::int64_t k = 0; k < kLanes; ++k)
      lanes[k] += wide(a[i + k]) * wide(b[i + k]) * (weight == nullptr ? 1.0f : weight[i + k]);
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  for (; i < width; ++i) sum += wide(a[i]) * wide(b[i]) * (weight == nullptr ? 1.0f : weight[i]);
  return sum;
}

template <class T>
MODELS_INLINE void norm_rows(const T* x, const float* weight, T* y, float* scales, std::int64_t rows,
                             std::int64_t width, float epsilon) {
  for (std::int64_t row = 0; row < rows; ++row, x += width, y += width) {
    const float scale = 1.0f / std::sqrt(dot<T>(x, x, nullptr, width) / static_cast<float>(width) + epsilon);
    scales[row] = scale;
    for (std::int64_t i = 0; i < width; ++i) y[i] = narrow<T>(weight[i] * rounded<T>(wide(x[i]) * scale));
  }
}

template <class T>
MODELS_INLINE void norm_rows_backward(const T* dy, const T* x, const float* weight, const float* scales, T* dx,
                                      float* dweight, std::int64_t rows, std::int64_t width) {
  for (std::int64_t row = 0; row < rows; ++row, x += width, dx += width, dy += width) {
    const float scale = scales[row];
    const float shared = dot<T>(dy, x, weight, width) * scale * scale * scale / static_cast<float>(width);
    for (std::int64_t i = 0; i < width; ++i) {
      const float slope = wide(dy[i]), value = wide(x[i]);
      dweight[i] += slope * rounded<T>(value * scale);
      dx[i] = narrow<T>(slope * weight[i] * scale - value * shared);
    }
  }
}

// One time step: all heads. sign: -1 turns backwards.
template <class T>
MODELS_INLINE void turn(const T* x, const T* cos, const T* sin, T* y, std::int64_t heads, std::int64_t width,
                        float sign) {
  const std::int64_t half = width / 2;
  for (std::int64_t head = 0; head < heads; ++head, x += width, y += width)
    for (std::int64_t i = 0; i < half; ++i) {
      const float a = wide(x[i]), b = wide(x[half + i]), c = wide(cos[i]), s = sign * wide(sin[i]);
      y[i] = narrow<T>(rounded<T>(a * c) + rounded<T>(-b * s));
      y[half + i] = narrow<T>(rounded<T>(b * c) + rounded<T>(a * s));
    }
}

template <class T>
MODELS_INLINE void gate_all(const T* gate, const T* up, T* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = wide(gate[i]);
    y[i] = narrow<T>(rounded<T>(g / (1.0f + exponential(-g))) * wide(up[i]));
  }
}

template <class T>
MODELS_INLINE void gate_all_backward(const T* dy, const T* gate, const T* up, T* dgate, T* dup, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = wide(gate[i]), slope = wide(dy[i]), share = 1.0f / (1.0f + exponential(-g));
    dup[i] = narrow<T>(slope * g * share);
    dgate[i] = narrow<T>(slope * wide(up[i]) * share * (1.0f + g * (1.0f - share)));
  }
}

// What runs: a clone for each kind of processor, with the loops above in it.
#define MODELS_KERNELS(T)                                                                                            \
  MODELS_CLONES void norm(const T* x, const float* w, T* y, float* s, std::int64_t n, std::int64_t width, float e) { \
    norm_rows<T>(x, w, y, s, n, width, e);                                                                           \
  }                                                                                                                  \
  MODELS_CLONES void norm_backward(const T* dy, const T* x, const float* w, const float* s, T* dx, float* dw,        \
                                   std::int64_t n, std::int64_t width) {                                             \
    norm_rows_backward<T>(dy, x, w, s, dx, dw, n, width);                                                            \
  }                                                                                                                  \
  MODELS_CLONES void turned(const T* x, const T* c, const T* s, T* y, std::int64_t heads, std::int64_t width,        \
                            float sign) {                                                                            \
    turn<T>(x, c, s, y, heads, width, sign);                                                                         \
  }                                                                                                                  \
  MODELS_CLONES void gated(const T* g, const T* u, T* y, std::int64_t n) { gate_all<T>(g, u, y, n); }                \
  MODELS_CLONES void gated_backward(const T* dy, const T* g, const T* u, T* dg, T* du, std::int64_t n) {             \
    gate_all_backward<T>(dy, g, u, dg, du, n);                                                                       \
  }
MODELS_KERNELS(float)
MODELS_KERNELS(Half16)
#undef MODELS_KERNELS

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
  x.scalar_type() == torch::kFloat32 ? f(float()) : f(Half16());
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
        norm(in<T>(x) + begin * width, in<float>(w), out<T>(y) + begin * width, out<float>(scales) + begin, end - begin,
             width, static_cast<float>(epsilon));
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
          norm_backward(in<T>(dy) + first * width, in<T>(x) + first * width, in<float>(w), in<float>(scales) + first,
                        out<T>(dx) + first * width, out<float>(dw) + part * width, count, width);
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
        turned(in<T>(ordered) + at, in<T>(c) + angle, in<T>(s) + angle, out<T>(y) + at, heads, width, sign);
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
        gated(in<T>(g) + begin, in<T>(u) + begin, out<T>(y) + begin, end - begin);
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
        gated_backward(in<T>(dy) + begin, in<T>(g) + begin, in<T>(u) + begin, out<T>(dg) + begin, out<T>(du) + begin,
                       end - begin);
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
  return weight * (wide * scale).to(weight.scalar_type());
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
