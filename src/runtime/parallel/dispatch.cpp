// See dispatch.h.
#include "parallel/dispatch.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace zero::parallel {
namespace {

// Of a routing (gate.h).
struct Places {
  const at::Tensor place, choice_of_row;
  std::int64_t tokens() const { return place.size(0); }
  std::int64_t choices() const { return place.size(1); }
  std::int64_t rows() const { return choice_of_row.size(0); }
};

// Elements of one task of at::parallel_for.
std::int64_t grain(std::int64_t width) { return std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(width, 1)); }

// rows[r] = weight of its choice * x[its token]. weights: contiguous [n, k] of the accumulation dtype, or undefined: 1.
template <class Value, class Sum>
void rows_of(Value* rows, const Value* x, const Sum* weights, const Places& places, std::int64_t width) {
  const auto* const choice_of = places.choice_of_row.const_data_ptr<std::int32_t>();
  const auto k = places.choices();
  at::parallel_for(0, places.rows(), grain(width), [&](std::int64_t begin, std::int64_t end) {
    for (auto r = begin; r < end; ++r) {
      const std::int64_t choice = choice_of[r];
      const auto* const from = x + choice / k * width;
      auto* const to = rows + r * width;
      if (weights == nullptr) {
        std::copy(from, from + width, to);
        continue;
      }
      const auto weight = weights[choice];
      for (std::int64_t i = 0; i < width; ++i) to[i] = static_cast<Value>(weight * static_cast<Sum>(from[i]));
    }
  });
}

// y[s] = sum of weight * rows[place of choice], first to last.
template <class Value, class Sum>
void sum_of_rows(Value* y, const Value* rows, const Sum* weights, const Places& places, std::int64_t width) {
  const auto* const place = places.place.const_data_ptr<std::int32_t>();
  const auto k = places.choices();
  at::parallel_for(0, places.tokens(), grain(width * k), [&](std::int64_t begin, std::int64_t end) {
    std::vector<Sum> sum(static_cast<std::size_t>(width));
    for (auto s = begin; s < end; ++s) {
      std::fill(sum.begin(), sum.end(), Sum(0));
      for (auto c = s * k; c < (s + 1) * k; ++c) {
        if (place[c] < 0) continue;
        const auto* const row = rows + place[c] * width;
        const auto weight = weights == nullptr ? Sum(1) : weights[c];
        for (std::int64_t i = 0; i < width; ++i) sum[static_cast<std::size_t>(i)] += weight * static_cast<Sum>(row[i]);
      }
      for (std::int64_t i = 0; i < width; ++i) y[s * width + i] = static_cast<Value>(sum[static_cast<std::size_t>(i)]);
    }
  });
}

// d[s, c] = y[s] . rows[place of choice]; 0 if not kept.
template <class Value, class Sum>
void products_of_rows(Sum* d, const Value* y, const Value* rows, const Places& places, std::int64_t width) {
  const auto* const place = places.place.const_data_ptr<std::int32_t>();
  const auto k = places.choices();
  at::parallel_for(0, places.tokens() * k, grain(width), [&](std::int64_t begin, std::int64_t end) {
    for (auto c = begin; c < end; ++c) {
      if (place[c] < 0) {
        d[c] = 0;
        continue;
      }
      const auto* const a = y + c / k * width;
      const auto* const b = rows + place[c] * width;
      constexpr std::int64_t kLanes = 16;
      std::array<Sum, kLanes> sums{};
      std::int64_t i = 0;
      for (; i + kLanes <= width; i += kLanes)
        for (std::int64_t lane = 0; lane < kLanes; ++lane)
          sums[static_cast<std::size_t>(lane)] += static_cast<Sum>(a[i + lane]) * static_cast<Sum>(b[i + lane]);
      for (; i < width; ++i) sums[0] += static_cast<Sum>(a[i]) * static_cast<Sum>(b[i]);
      d[c] = std::accumulate(sums.begin(), sums.end(), Sum(0));
    }
  });
}

// Calls fn with the dtypes of values and of sums.
template <class Fn>
void with_dtypes(const at::Tensor& values, const Fn& fn) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, values.scalar_type(), "mixture of experts",
                                  [&] { fn(scalar_t(), at::opmath_type<scalar_t>()); });
}

// Indices and their tokens on the device of the values, where the loops above do not reach.
at::Tensor on(const at::Tensor& index, const at::Tensor& values) { return index.to(values.device(), at::kLong); }
at::Tensor tokens_of(const Places& places, const at::Tensor& values) {
  return on(places.choice_of_row, values).floor_divide(places.choices());
}

at::ScalarType sum_dtype(const at::Tensor& values) { return at::toOpMathType(values.scalar_type()); }

// `count` rows on a CPU that `loop` fills: its arguments are their data, those of `from` and of the factors, or null.
template <class Loop>
at::Tensor moved(const at::Tensor& from, std::int64_t count, const at::Tensor& factors, const Loop& loop) {
  const auto in = from.contiguous();
  auto out = at::empty({count, from.size(1)}, from.options());
  with_dtypes(from, [&](auto value, auto sum) {
    using Value = decltype(value);
    using Sum = decltype(sum);
    const Sum* const weights = factors.defined() ? factors.const_data_ptr<Sum>() : nullptr;
    loop(out.mutable_data_ptr<Value>(), in.const_data_ptr<Value>(), weights);
  });
  return out;
}

// weights: undefined: 1.
at::Tensor to_rows(const at::Tensor& x, const at::Tensor& weights, const Places& places) {
  const auto factors = weights.defined() ? weights.to(sum_dtype(x)).contiguous() : at::Tensor();
  if (!x.is_cpu()) {
    auto rows = x.index_select(0, tokens_of(places, x));
    if (!factors.defined()) return rows;
    return (rows.to(sum_dtype(x)) * factors.view({-1, 1}).index_select(0, on(places.choice_of_row, x)))
        .to(x.scalar_type());
  }
  return moved(x, places.rows(), factors, [&](auto... arguments) { rows_of(arguments..., places, x.size(1)); });
}

at::Tensor to_tokens(const at::Tensor& rows, const at::Tensor& weights, const Places& places) {
  const auto factors = weights.defined() ? weights.to(sum_dtype(rows)).contiguous() : at::Tensor();
  if (!rows.is_cpu()) {
    auto sum = at::zeros({places.tokens(), rows.size(1)}, rows.options().dtype(sum_dtype(rows)));
    if (places.rows() == 0) return sum.to(rows.scalar_type());
    const auto place = on(places.place, rows);
    for (std::int64_t c = 0; c < places.choices(); ++c) {
      const auto of = place.select(1, c);
      auto term = rows.index_select(0, of.clamp_min(0)).to(sum.scalar_type());
      if (factors.defined()) term = term * factors.narrow(1, c, 1);
      sum += term.masked_fill(of.unsqueeze(1) < 0, 0);
    }
    return sum.to(rows.scalar_type());
  }
  return moved(rows, places.tokens(), factors,
               [&](auto... arguments) { sum_of_rows(arguments..., places, rows.size(1)); });
}

// Of the dtype of sums, [n, k].
at::Tensor products(const at::Tensor& y, const at::Tensor& rows, const Places& places) {
  if (!rows.is_cpu()) {
    const auto sum = sum_dtype(rows);
    if (places.rows() == 0) return at::zeros(places.place.sizes(), rows.options().dtype(sum));
    const auto of_row = (y.index_select(0, tokens_of(places, y)).to(sum) * rows.to(sum)).sum(1);
    return at::zeros(places.place.sizes(), of_row.options())
        .view({-1})
        .index_copy(0, on(places.choice_of_row, rows), of_row)
        .view(places.place.sizes());
  }
  const auto a = y.contiguous(), b = rows.contiguous();
  auto d = at::empty(places.place.sizes(), rows.options().dtype(sum_dtype(rows)));
  with_dtypes(rows, [&](auto value, auto sum) {
    using Value = decltype(value);
    products_of_rows(d.mutable_data_ptr<decltype(sum)>(), a.const_data_ptr<Value>(), b.const_data_ptr<Value>(), places,
                     rows.size(1));
  });
  return d;
}

// The three are each other's derivatives, so every derivative has a graph. The routing is saved as tensors are: a
// recomputation that routes otherwise replaces it together with the rows.
using Context = torch::autograd::AutogradContext;
using Variables = torch::autograd::variable_list;
using Weights = std::optional<at::Tensor>;  // none: 1
Weights weights_in(const Variables& saved) { return saved[1].defined() ? Weights(saved[1]) : std::nullopt; }

struct ToRows final : torch::autograd::Function<ToRows> {
  static at::Tensor forward(Context* context, const at::Tensor& x, const Weights& weights, const at::Tensor& place,
                            const at::Tensor& choice_of_row) {
    context->save_for_backward({weights ? x : at::Tensor(), weights.value_or(at::Tensor()), place, choice_of_row});
    return to_rows(x, weights.value_or(at::Tensor()), {place, choice_of_row});
  }
  static Variables backward(Context* context, Variables gradients);
};

struct ToTokens final : torch::autograd::Function<ToTokens> {
  static at::Tensor forward(Context* context, const at::Tensor& rows, const Weights& weights, const at::Tensor& place,
                            const at::Tensor& choice_of_row) {
    context->save_for_backward({weights ? rows : at::Tensor(), weights.value_or(at::Tensor()), place, choice_of_row});
    return to_tokens(rows, weights.value_or(at::Tensor()), {place, choice_of_row});
  }
  static Variables backward(Context* context, Variables gradients);
};

struct Products final : torch::autograd::Function<Products> {
  static at::Tensor forward(Context* context, const at::Tensor& y, const at::Tensor& rows, const at::Tensor& place,
                            const at::Tensor& choice_of_row) {
    context->save_for_backward({y, rows, place, choice_of_row});
    return products(y, rows, {place, choice_of_row});
  }
  static Variables backward(Context* context, Variables gradients);
};

Variables ToRows::backward(Context* context, Variables gradients) {
  const auto saved = context->get_saved_variables();
  const auto &x = saved[0], &weights = saved[1], &rows = gradients[0];
  at::Tensor of_x, of_weights;
  if (context->needs_input_grad(0)) of_x = ToTokens::apply(rows, weights_in(saved), saved[2], saved[3]);
  if (weights.defined() && context->needs_input_grad(1))
    of_weights = Products::apply(x, rows, saved[2], saved[3]).to(weights.scalar_type());
  return {of_x, of_weights, at::Tensor(), at::Tensor()};
}

Variables ToTokens::backward(Context* context, Variables gradients) {
  const auto saved = context->get_saved_variables();
  const auto &rows = saved[0], &weights = saved[1], &y = gradients[0];
  at::Tensor of_rows, of_weights;
  if (context->needs_input_grad(0)) of_rows = ToRows::apply(y, weights_in(saved), saved[2], saved[3]);
  if (weights.defined() && context->needs_input_grad(1))
    of_weights = Products::apply(y, rows, saved[2], saved[3]).to(weights.scalar_type());
  return {of_rows, of_weights, at::Tensor(), at::Tensor()};
}

Variables Products::backward(Context* context, Variables gradients) {
  const auto saved = context->get_saved_variables();
  const auto &y = saved[0], &rows = saved[1], &products = gradients[0];
  at::Tensor of_y, of_rows;
  if (context->needs_input_grad(0)) of_y = ToTokens::apply(rows, Weights(products), saved[2], saved[3]);
  if (context->needs_input_grad(1)) of_rows = ToRows::apply(y, Weights(products), saved[2], saved[3]);
  return {of_y, of_rows, at::Tensor(), at::Tensor()};
}

}  // namespace

at::Tensor dispatch(const at::Tensor& x, const Routing& routing) {
  return ToRows::apply(x, Weights(), routing.place, routing.choice_of_row);
}

at::Tensor combine(const at::Tensor& rows, const at::Tensor& weights, const Routing& routing) {
  return ToTokens::apply(rows, Weights(weights), routing.place, routing.choice_of_row);
}

}  // namespace zero::parallel
