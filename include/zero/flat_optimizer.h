// The Engine's optimizer update on flat buffers of the caller, without modules or ranks. One pass unscales the
// gradient, updates fp32 master parameters and optimizer states, and writes the low-precision parameters. It computes
// no gradient norm and has no overflow check. All calls are local.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <zero/export.h>
#include <zero/options.h>

namespace zero {

// The operands of one update: flat, contiguous CPU tensors with the same number of elements.
struct FlatTensors {
  at::Tensor master;               // fp32, updated in place
  std::vector<at::Tensor> states;  // fp32, from FlatOptimizer::make_states(); updated in place
  at::Tensor gradient;             // fp32, bf16 or fp16; read
  at::Tensor parameter;            // fp32, bf16 or fp16: receives the master, rounded once. Undefined: not written
};

// The optimizer of the options' "optimizer" and "scheduler" (docs/configuration.md), with the rounding of
// docs/numerics.md. libzero.parameter_groups has no effect. The update is element-wise: results do not
// depend on the number of threads (OpenMP, at::set_num_threads) or the SIMD target.
class ZERO_API FlatOptimizer {
 public:
  // ConfigError if the options have no optimizer or a schedule that does not fit it.
  explicit FlatOptimizer(const Options& options);
  ~FlatOptimizer();
  FlatOptimizer(FlatOptimizer&&) noexcept;
  FlatOptimizer(const FlatOptimizer&) = delete;

  // torch's names of the states per element besides the master ("exp_avg", "momentum_buffer", ...): 0 to 2.
  std::vector<std::string> state_names() const;
  // One new tensor per state, with `elements` elements and the state's initial value.
  std::vector<at::Tensor> make_states(std::int64_t elements) const;

  // Performs update applied_steps() + 1 with gradient * factor. factor: 1 / loss scale, times the clipping coefficient.
  // ConfigError if the tensors are not as FlatTensors requires; nothing is changed then.
  void step(const FlatTensors& tensors, float factor = 1);
  std::int64_t applied_steps() const;
  double lr() const;  // of the next update

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zero
