// Activation checkpointing (Chen et al., 1604.06174): a segment keeps only its inputs and is
// run again in backward. Non-reentrant: parameter hooks fire once, dropout is repeated exactly.
#pragma once
#include <functional>
#include <memory>
#include <utility>

namespace zero {
namespace detail {
// While it lives, what autograd would save in this thread is dropped; `again` recomputes it.
class CheckpointScope {
 public:
  explicit CheckpointScope(std::function<void()> again);
  ~CheckpointScope();
  CheckpointScope(const CheckpointScope&) = delete;
  CheckpointScope& operator=(const CheckpointScope&) = delete;

 private:
  struct State;
  std::shared_ptr<State> state_;
};
}  // namespace detail

// Runs fn(inputs...) keeping only its inputs; runs it again in backward with the random number
// state restored. Returns what fn returns. fn is copied and must give the same result twice.
template <class Fn, class... Tensors>
auto activation_checkpoint(Fn&& fn, Tensors&&... inputs) {
  detail::CheckpointScope scope([fn, inputs...]() mutable { (void)fn(inputs...); });
  return fn(inputs...);
}

}  // namespace zero
