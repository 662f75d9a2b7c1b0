#include "torchglue/gradient_hook.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace zero::torchglue {
namespace {
struct Hook : torch::autograd::PostAccumulateGradHook {
  explicit Hook(std::function<void()> fn) : fn_(std::move(fn)) {}
  void operator()(const torch::autograd::Variable&) override { fn_(); }
  std::function<void()> fn_;
};
}  // namespace

void set_gradient_hook(const at::Tensor& parameter, std::function<void()> hook) {
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, hook ? std::make_unique<Hook>(std::move(hook)) : nullptr);
}

HookPlace gradient_hook_of(const at::Tensor& parameter) {
  if (torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return HookPlace::Empty;
  const auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (hook == nullptr) return HookPlace::Empty;
  return dynamic_cast<const Hook*>(hook.get()) != nullptr ? HookPlace::Ours : HookPlace::Foreign;
}

}  // namespace zero::torchglue
