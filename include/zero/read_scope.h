// Reads of parameters that the dispatcher does not see: kernels that take addresses instead of tensors.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>

#include <zero/export.h>

namespace zero {

// RAII guard. While it lives, the parameters of Engines among `tensors`, and those of which `tensors` has views, are
// unsharded, as for one operator that reads all of them. Without it, data_ptr() of a sharded parameter throws. Use it
// around a custom kernel, or a compiled graph (libzero.compile of the Python package uses it). Inside, operators may
// run as well.
//
// [collective] at stage 3, in the same order on every rank; else [local]. `kernel` is a name for messages and must
// outlive the scope. training: a backward of what is computed follows; grad mode need not be enabled. Throws what a
// forward throws. Thread-safe, as operators are.
class ZERO_API ReadScope {
 public:
  ReadScope(at::TensorList tensors, const char* kernel, bool training);
  ~ReadScope();
  ReadScope(ReadScope&&) noexcept;
  ReadScope(const ReadScope&) = delete;

  // [local] The kernel writes these tensors. ConfigError if a parameter is among them that may not be written here.
  static void check_write(at::TensorList tensors, const char* kernel);

 private:
  struct State;
  std::unique_ptr<State> state_;  // null: no parameter
};

}  // namespace zero
