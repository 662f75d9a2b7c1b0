#include "engine/gradient_guard.h"

#include "base/check.h"
#include "engine/backward_scope.h"
#include "torch_hooks/storage_access.h"

namespace zero::engine {
namespace {

constexpr const char* kHint =
    "Hint: from backward() to step() gradients are the Engine's: engine.gradient(name) reads one, gradient_clipping, "
    "or "
    "in Python engine.clip_grad_norm_(), clips them, a hook on the parameter changes them while backward runs; call "
    "engine.backward(loss) instead of loss.backward().";

}  // namespace

GradientGuard::GradientGuard(const std::vector<ModelParameter>& members) : members_(members), guards_(members.size()) {}

GradientGuard::~GradientGuard() {
  for (std::size_t i = 0; i < guards_.size(); ++i) {
    if (!guards_[i].defined()) continue;
    if (is_there(i)) lift(i, at::Tensor());
    torch_hooks::stop_intercepting(guards_[i], guards_[i].storage());
  }
}

void GradientGuard::put(std::size_t member) {
  const auto& parameter = members_[member].tensor;
  auto& guard = guards_[member];
  if (!guard.defined()) {
    guard = torch_hooks::without_data(parameter.sizes(), parameter.scalar_type(), parameter.device());
    torch_hooks::release_storage(guard.storage(),
                                 base::join("the gradient of parameter ", members_[member].name, " was read. ", kHint));
    torch_hooks::intercept(guard, this, static_cast<int>(member));
  }
  parameter.mutable_grad() = guard;
}

void GradientGuard::lift(std::size_t member, const at::Tensor& grad) { members_[member].tensor.mutable_grad() = grad; }

bool GradientGuard::is_there(std::size_t member) const {
  return guards_[member].defined() && members_[member].tensor.grad().is_same(guards_[member]);
}

void GradientGuard::fail(int tag, const char* op) const {
  throw ConfigError(base::join("[Engine] ", op, " got the gradient of parameter ",
                               members_[static_cast<std::size_t>(tag)].name, " between backward() and step(). ",
                               kHint));
}

void GradientGuard::before_use(const int* tags, int, const char* op) { fail(tags[0], op); }

bool GradientGuard::before_write(int tag, const char* op) {
  if (BackwardScope::active()) return false;  // the gradient belongs to another Engine's backward
  fail(tag, op);
}

}  // namespace zero::engine
