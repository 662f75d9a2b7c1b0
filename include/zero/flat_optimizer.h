// The Engine's update over memory of the caller: one pass that unscales the gradient, updates fp32
// masters and states, and writes the compute copy. For programs that keep their own flat buffers, and
// for measuring. No modules, ranks, gradient norms or overflow tests: those are the Engine's.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <zero/export.h>
#include <zero/options.h>

namespace zero {

// What one update reads and writes: flat, contiguous tensors on the CPU with the same number of elements.
struct FlatTensors {
  at::Tensor master;               // fp32, updated in place
  std::vector<at::Tensor> states;  // fp32, FlatOptimizer::make_states(), updated in place
  at::Tensor gradient;             // fp32, bf16 or fp16, read
  at::Tensor parameter;            // fp32, bf16 or fp16: becomes the master, rounded once; undefined: none
};

// Adam, AdamW, SGD, Adagrad or Lion as the options' "optimizer" and "scheduler" say (docs/configuration.md), with the
// roundings of docs/numerics.md; groups of parameters are not looked at. Element-wise: neither the number of threads
// (OpenMP's, at::set_num_threads) nor the SIMD target changes a bit.
class ZERO_API FlatOptimizer {
 public:
  // ConfigError if the options choose no optimizer, or if the schedule does not fit it.
  explicit FlatOptimizer(const Options& options);
  ~FlatOptimizer();
  FlatOptimizer(FlatOptimizer&&) noexcept;
  FlatOptimizer(const FlatOptimizer&) = delete;

  // torch's names of what is kept per element beside the master ("exp_avg", "momentum_buffer", ...): 0 to 2.
  std::vector<std::string> state_names() const;
  // One new tensor a state, of `elements` elements at the state's first value.
  std::vector<at::Tensor> make_states(std::int64_t elements) const;

  // Update number applied_steps() + 1, with gradient * factor: the inverse of the loss scale, times what clips.
  // ConfigError, and nothing changed, if the tensors do not fit as FlatTensors says.
  void step(const FlatTensors& tensors, float factor = 1);
  std::int64_t applied_steps() const;
  double lr() const;  // of the next update

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zero
