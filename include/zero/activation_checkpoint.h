// Activation checkpointing (Chen et al., 1604.06174): a segment keeps only its inputs and is
// run again in backward. Non-reentrant: parameter hooks fire once, dropout is repeated exactly.
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
// While it lives, what autograd would save in this thread is dropped; `again`, called with the
// inputs, recomputes it. `may_stop`: `again` is left by an exception as soon as nothing is missing.
class ZERO_API CheckpointScope {
 public:
  using Again = std::function<void(const std::vector<at::Tensor>& inputs)>;
  CheckpointScope(std::vector<at::Tensor> inputs, Again again, bool may_stop);
  ~CheckpointScope();
  // The first run has ended well.
  void end();
  CheckpointScope(const CheckpointScope&) = delete;
  CheckpointScope& operator=(const CheckpointScope&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

template <class T>
inline constexpr bool is_tensor = std::is_same_v<std::decay_t<T>, at::Tensor>;
}  // namespace detail

// Runs fn(inputs...) keeping only its inputs; runs it again in backward with the random number
// state, autocast and grad mode restored. Returns what fn returns. fn is copied, must give the same
// result twice, and must not write its inputs; inputs that are not tensors are copied. What fn
// captures is kept as it is: hand tensors over as inputs. Buffers it updates (running statistics of
// batch norm) are updated by both runs. May be nested. Without grad mode it is
// just fn(inputs...). Backward throws ConfigError when the second run saves other tensors than the
// first, when an input or a parameter was written in between, and when another thread drew from
// the same random number generator while fn used it (ranks as threads with dropout).
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
  // Braces: from left to right.
  std::tuple<std::decay_t<Inputs>...> others{without_tensors(inputs)...};
  auto again = [fn, others = std::move(others)](const std::vector<at::Tensor>& kept) mutable {
    auto arguments = others;
    std::size_t next = 0;
    const auto refill = [&](auto& argument) {
      if constexpr (detail::is_tensor<decltype(argument)>) argument = kept[next++];
    };
    std::apply([&](auto&... each) { (refill(each), ...), (void)fn(each...); }, arguments);
  };
  // An exception cannot pass a noexcept function (the second form: copying an argument may throw).
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

}  // namespace zero
