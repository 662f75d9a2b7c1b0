// Activation checkpointing (Chen et al., 1604.06174): a segment saves only its inputs and is recomputed in backward.
// Non-reentrant: parameter hooks fire once, and dropout is reproduced exactly.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <zero/export.h>

namespace zero {
namespace detail {
// RAII guard. In this thread, autograd saves no tensors of the segment; backward calls `again` with the inputs to
// recompute them. may_stop: the recomputation may be ended early, by an exception, once every tensor is restored.
class ZERO_API CheckpointScope {
 public:
  using Again = std::function<void(const std::vector<at::Tensor>& inputs)>;
  CheckpointScope(std::vector<at::Tensor> inputs, Again again, bool may_stop);
  ~CheckpointScope();
  // Marks the first run as complete.
  void end();
  CheckpointScope(const CheckpointScope&) = delete;
  CheckpointScope& operator=(const CheckpointScope&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Of the first run; made by `make` outside of a recomputation.
ZERO_API std::shared_ptr<const void> kept_in_checkpoint(const std::function<std::shared_ptr<const void>()>& make);

template <class T>
inline constexpr bool is_tensor = std::is_same_v<std::decay_t<T>, at::Tensor>;
}  // namespace detail

// Calls fn(inputs...) and returns its result. Only the inputs are saved; backward calls fn again, with the random
// number generator state, autocast and grad mode restored. Local. Without grad mode this is a plain call of fn.
// - fn is copied. It must be deterministic and must not modify its inputs. Inputs that are not tensors are copied.
// - Pass tensors as inputs. Tensors that fn captures stay in memory.
// - Buffers that fn updates (running statistics of batch norm) are updated by both runs.
// - Calls may be nested.
// Backward throws ConfigError if the recomputation saves other tensors than the first run, if an input or a parameter
// was modified in between, or if another thread drew from the same random number generator while fn used it (ranks as
// threads, with dropout).
template <class Fn, class... Inputs>
auto activation_checkpoint(Fn&& fn, Inputs&&... inputs) {
  std::vector<at::Tensor> tensors;
  const auto without_tensors = [&](const auto& input) {
    if constexpr (detail::is_tensor<decltype(input)>) {
      tensors.push_back(input);
      return at::Tensor();
    } else {
      return input;
    }
  };
  // Braced initialization evaluates from left to right.
  std::tuple<std::decay_t<Inputs>...> others{without_tensors(inputs)...};
  auto again = [fn, others = std::move(others)](const std::vector<at::Tensor>& kept) mutable {
    auto arguments = others;
    std::size_t next = 0;
    const auto refill = [&](auto& argument) {
      if constexpr (detail::is_tensor<decltype(argument)>) argument = kept[next++];
    };
    std::apply([&](auto&... each) { (refill(each), ...), (void)fn(each...); }, arguments);
  };
  // may_stop needs an fn that is not noexcept. The second form covers copies of the arguments, which may throw.
  constexpr bool kPasses =
      !std::is_nothrow_invocable_v<Fn&, Inputs&...> && !std::is_nothrow_invocable_v<Fn&, std::decay_t<Inputs>...>;
  detail::CheckpointScope scope(std::move(tensors), std::move(again), kPasses);
  if constexpr (std::is_void_v<decltype(fn(inputs...))>) {
    fn(inputs...);
    scope.end();
  } else {
    auto result = fn(inputs...);
    scope.end();
    return result;
  }
}

// For a decision in a checkpointed function that must be the same in both runs, such as the choice of experts, where
// computing it again could round differently, draw random numbers or communicate. Calls fn() and returns its result,
// which is kept for the recomputation; that returns it, with the random number generators as fn left them, without a
// call of fn. A plain call of fn outside of activation_checkpoint(). Local. Nothing may be differentiable in the
// result.
template <class Fn>
auto kept_in_checkpoint(Fn&& fn) {
  using Result = std::decay_t<decltype(fn())>;
  const auto kept = detail::kept_in_checkpoint([&] { return std::make_shared<const Result>(fn()); });
  return *static_cast<const Result*>(kept.get());
}

}  // namespace zero
