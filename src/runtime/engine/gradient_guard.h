// The value of .grad between Engine::backward and step(): a tensor of the parameter's shape without data. The Engine
// owns the gradient then, and which part of it a rank holds, reduced or not, depends on the stage. Reading or writing
// the guard is the same error at every stage.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "engine/units.h"
#include "torch_hooks/interception.h"

namespace zero::engine {

class GradientGuard final : public torch_hooks::UseListener {
 public:
  // `members` must outlive the guard.
  explicit GradientGuard(const std::vector<ModelParameter>& members);
  ~GradientGuard() override;
  GradientGuard(const GradientGuard&) = delete;
  GradientGuard& operator=(const GradientGuard&) = delete;

  // Sets the member's .grad to its guard.
  void put(std::size_t member);
  // Sets it to `grad`, which may be undefined.
  void lift(std::size_t member, const at::Tensor& grad);
  bool is_there(std::size_t member) const;

 private:
  void before_use(const int* tags, int count, const char* op) override;
  void after_use(const int*, int) noexcept override {}
  bool before_write(int tag, const char* op) override;
  [[noreturn]] void fail(int tag, const char* op) const;

  const std::vector<ModelParameter>& members_;
  std::vector<at::Tensor> guards_;  // by member, created on first use
};

}  // namespace zero::engine
