// See member_gradients.h.
#include "engine/member_gradients.h"

#include <utility>

#include "base/check.h"
#include "torch_hooks/gradient_hook.h"

namespace zero::engine {

MemberGradients::MemberGradients(const std::vector<ModelParameter>& members, std::string group, bool trainable)
    : members_(members),
      group_(std::move(group)),
      trainable_(trainable),
      active_(members.size(), trainable),
      excluded_(members.size()),
      kept_(members.size()),
      guard_(members) {}

void MemberGradients::choose_active(bool first) {
  for (std::size_t i = 0; i < members_.size(); ++i) active_[i] = trainable_ && takes_part(i, first);
}

bool MemberGradients::activity_changed(bool first) const {
  for (std::size_t i = 0; i < members_.size(); ++i)
    if (takes_part(i, first) != active(i)) return true;
  return false;
}

std::string MemberGradients::find_meddling(bool first) const {
  if (!mixed_.empty())
    return "another backward, of another Engine or loss.backward(), added to the gradient of parameter " + mixed_ +
           ", which waits with its graph since a backward with create_graph. Hint: call "
           "engine.discard_micro_batch(), and let nothing else reach this model between the two passes.";
  for (std::size_t i = 0; i < members_.size(); ++i) {
    const auto& name = members_[i].name;
    const auto& tensor = members_[i].tensor;
    if (excluded(i)) continue;
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
  for (std::size_t i = 0; i < members_.size(); ++i)
    if (!excluded(i)) guard_.put(i);
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
    if (excluded(i)) continue;
    kept_[i] = {};
    members_[i].tensor.mutable_grad() = at::Tensor();
  }
}

at::Tensor MemberGradients::arrived(std::size_t i) const {
  auto grad = members_[i].tensor.grad();
  if (!grad.defined() || !active(i)) return {};
  if (grad.requires_grad()) grad = grad.detach();  // its graph is no longer needed
  return grad.is_sparse() ? grad.to_dense() : grad;
}

void MemberGradients::keep(std::size_t i, at::Tensor grad, const step::View& view) {
  auto& parameter = members_[i].tensor;
  if (!grad.is_same(parameter.grad())) parameter.mutable_grad() = grad;
  kept_[i] = {std::move(grad), view};
}

}  // namespace zero::engine
