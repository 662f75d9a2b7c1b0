#include "torch_hooks/gradient_hook.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace zero::torch_hooks {
namespace {
struct Hook : torch::autograd::PostAccumulateGradHook {
  explicit Hook(std::function<void()> fn) : fn_(std::move(fn)) {}
  void operator()(const torch::autograd::Variable&) override { fn_(); }
  std::function<void()> fn_;
};

// The number of references that autograd itself holds to a gradient's storage while the hook runs: measured once, with
// a gradient that is not shared.
std::size_t count_owners() {
  const c10::InferenceMode no_inference(false);
  const at::AutoGradMode grad_mode(true);
  std::size_t owners = 1;
  const auto probe = at::ones({2}).set_requires_grad(true);
  torch::autograd::impl::set_post_acc_grad_hooks(
      probe, std::make_unique<Hook>([&] { owners = probe.grad().storage().use_count(); }));
  torch::autograd::backward({(probe * 2).sum()}, {});
  torch::autograd::impl::set_post_acc_grad_hooks(probe, nullptr);
  return owners;
}

std::size_t owners_of_unshared() {
  static const std::size_t owners = count_owners();
  return owners;
}

}  // namespace

bool owns_storage(const at::Tensor& grad) {
  return grad.storage().use_count() <= owners_of_unshared() &&
         grad.storage().nbytes() == static_cast<std::size_t>(grad.numel()) * grad.element_size();
}

void set_gradient_hook(const at::Tensor& parameter, std::function<void()> hook) {
  owners_of_unshared();  // so that it is not measured inside a backward
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, hook ? std::make_unique<Hook>(std::move(hook)) : nullptr);
}

HookPlace gradient_hook_of(const at::Tensor& parameter) {
  if (torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return HookPlace::Empty;
  const auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (hook == nullptr) return HookPlace::Empty;
  return dynamic_cast<const Hook*>(hook.get()) != nullptr ? HookPlace::Ours : HookPlace::Foreign;
}

}  // namespace zero::torch_hooks
