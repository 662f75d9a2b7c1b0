#include "engine/member_gradients.h"

#include <utility>

#include "base/check.h"
#include "engine/tensor_arithmetic.h"
#include "kernels/elementwise.h"
#include "torch_hooks/allocation_observer.h"
#include "torch_hooks/gradient_hook.h"

namespace zero::engine {
namespace {

double squares_of(const at::Tensor& grad) {
  return kernels::sum_of_squares(grad.const_data_ptr(), dtype_of(grad.scalar_type()), grad.numel());
}

}  // namespace

MemberGradients::MemberGradients(const std::vector<ModelParameter>& members, const GroupContext& context,
                                 std::string group, bool trainable)
    : members_(members),
      context_(context),
      group_(std::move(group)),
      trainable_(trainable),
      active_(members.size(), trainable),
      kept_(members.size()),
      guard_(members) {}

void MemberGradients::choose_active() {
  for (std::size_t i = 0; i < members_.size(); ++i) active_[i] = trainable_ && members_[i].tensor.requires_grad();
}

bool MemberGradients::activity_changed() const {
  for (std::size_t i = 0; i < members_.size(); ++i)
    if (members_[i].tensor.requires_grad() != (active_[i] != 0)) return true;
  return false;
}

std::string MemberGradients::find_meddling(bool first, bool updates) const {
  if (!mixed_.empty())
    return "another backward, of another Engine or loss.backward(), added to the gradient of parameter " + mixed_ +
           ", which waits with its graph since a backward with create_graph. Hint: call "
           "engine.discard_micro_batch(), and let nothing else reach this model between the two passes.";
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const auto& [name, aliases, tensor, unit] = members_[i];
    if (!first && !updates && tensor.requires_grad() != (active_[i] != 0))
      return base::join("requires_grad of parameter ", name, " was changed to ",
                        tensor.requires_grad() ? "true" : "false",
                        " between two micro-batches of one step. Hint: freeze and unfreeze after step() has acted.");
    if (!trainable_ && (!first || !tensor.requires_grad())) continue;
    if (keeps_graph_ || (first ? !tensor.grad().defined() : guard_.is_there(i))) continue;
    if (first)
      return "the .grad of parameter " + name +
             " holds a gradient that no backward of this Engine made. Hint: module.zero_grad(), and "
             "engine.backward(loss) "
             "instead of loss.backward().";
    return "the gradient of " + name + " (group " + group_ +
           ") was cleared or replaced between two micro-batches, or before step(). Hint: leave .grad alone, and do not "
           "call "
           "zero_grad(); the Engine clears gradients after the step. engine.discard_micro_batch() drops this one, to "
           "go "
           "on.";
  }
  return "";
}

void MemberGradients::begin_pass(bool keeps_graph) {
  for (std::size_t i = 0; i < members_.size(); ++i)
    if (guard_.is_there(i)) guard_.lift(i, kept_[i].grad);
  keeps_graph_ = keeps_graph;
}

void MemberGradients::end_pass() {
  if (!trainable_ || keeps_graph_) return;
  for (std::size_t i = 0; i < members_.size(); ++i) guard_.put(i);
}

void MemberGradients::drop_foreign(std::size_t i) {
  if (guard_.is_there(i)) return;
  if (keeps_graph_)
    mixed_ = members_[i].name;
  else
    members_[i].tensor.mutable_grad() = at::Tensor();
}

void MemberGradients::drop() {
  keeps_graph_ = false;
  mixed_.clear();
  if (!trainable_) return;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    auto& kept = kept_[i];
    // The observer reports the free as one of activations: give it something to cancel.
    if (kept.booked != 0 && !context_.device.is_cpu())
      context_.ledger->book(step::Tier::Device, step::Purpose::Gradients, -kept.booked);
    else if (kept.booked != 0)
      context_.ledger->rebook(step::Tier::Device, step::Purpose::Gradients, step::Purpose::Activations, kept.booked);
    kept = {};
    members_[i].tensor.mutable_grad() = at::Tensor();
  }
}

at::Tensor MemberGradients::readable(const at::Tensor& grad) const {
  const auto wire = context_.recipe.wire;
  if (grad.scalar_type() == wire && context_.comm->holds(grad) && torch_hooks::owns_storage(grad))
    return grad.view({-1});
  auto copy = context_.blocks->make(grad.numel(), wire);
  convert(Stretch(copy), Stretch(grad));
  return copy;
}

void MemberGradients::keep(std::size_t i, at::Tensor grad, bool adds, bool take_squares) {
  auto& kept = kept_[i];
  if (!grad.is_contiguous() || grad.scalar_type() != context_.recipe.gradient)
    grad = grad.to(context_.recipe.gradient).contiguous();
  if (adds && kept.grad.defined() && kept.grad.const_data_ptr() != grad.const_data_ptr())
    throw ConfigError("[Engine::backward] the gradient of " + members_[i].name + " (group " + group_ +
                      ") was replaced while backward ran. Hint: a hook may change a gradient, not .grad.");
  // What other tensors share would change with the sum over ranks, and in the next passes.
  if (!grad.is_same(kept.grad) && !torch_hooks::owns_storage(grad)) grad = grad.clone();
  if (context_.blocks != nullptr && grad.numel() > 0 && !context_.comm->holds(grad))
    grad = readable(grad).view(grad.sizes());
  auto& parameter = members_[i].tensor;
  if (!grad.is_same(parameter.grad())) parameter.mutable_grad() = grad;
  kept.grad = std::move(grad);
  if (context_.blocks != nullptr) return;
  book(kept);
  kept.squares = take_squares ? squares_of(kept.grad) : -1.0;
}

void MemberGradients::book(Kept& kept) {
  if (kept.booked != 0) return;
  kept.booked = static_cast<std::int64_t>(kept.grad.nbytes());
  if (context_.device.is_cpu())
    context_.ledger->rebook(step::Tier::Device, step::Purpose::Activations, step::Purpose::Gradients, kept.booked);
  else  // nobody counts activations there
    context_.ledger->book(step::Tier::Device, step::Purpose::Gradients, kept.booked);
}

void MemberGradients::copy_kept() {
  const torch_hooks::AllocationObserver::Pause pause;
  for (const auto& kept : kept_) {
    auto copy = kept.grad.defined() ? kept.grad.clone() : at::Tensor();
    if (copy.defined())
      context_.ledger->book(step::Tier::Device, step::Purpose::Gradients, static_cast<std::int64_t>(copy.nbytes()));
    copies_.push_back(std::move(copy));
  }
}

void MemberGradients::go_back() {
  drop();
  for (std::size_t i = 0; i < copies_.size(); ++i) {
    if (!copies_[i].defined()) continue;
    auto grad = copies_[i].clone();  // counted as what backward allocates
    if (context_.blocks != nullptr && grad.numel() > 0) grad = readable(grad).view(grad.sizes());
    kept_[i].grad = std::move(grad);
    if (context_.blocks == nullptr) book(kept_[i]);
  }
}

void MemberGradients::forget_copy() {
  for (const auto& copy : copies_)
    if (copy.defined())
      context_.ledger->book(step::Tier::Device, step::Purpose::Gradients, -static_cast<std::int64_t>(copy.nbytes()));
  copies_.clear();
}

void MemberGradients::keep_zeros(std::size_t i, std::int64_t numel) {
  auto& grad = kept_[i].grad;
  grad = context_.blocks->make(numel, context_.recipe.wire).zero_().view(members_[i].tensor.sizes());
  members_[i].tensor.mutable_grad() = grad;
}

double MemberGradients::sum_of_squares() const {
  double sum = 0;
  for (const auto& kept : kept_)
    if (kept.grad.defined()) sum += kept.squares < 0 ? squares_of(kept.grad) : kept.squares;
  return sum;
}

}  // namespace zero::engine
