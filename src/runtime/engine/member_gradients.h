// What autograd finds and leaves in the .grad of a group's members, and what a program finds there meanwhile. How
// gradients are kept and reduced is the step program's.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "engine/gradient_guard.h"
#include "engine/units.h"
#include "step/backend.h"

namespace zero::engine {

class MemberGradients {
 public:
  // `members` outlive this; `group` is its name, for messages.
  MemberGradients(const std::vector<ModelParameter>& members, std::string group, bool trainable);

  // Members without requires_grad get no gradient and no update from now on, others do. Before a step's first pass.
  void choose_active();
  void set_trainable(bool trainable) { trainable_ = trainable; }
  bool activity_changed() const;
  bool active(std::size_t i) const { return active_[i] != 0; }

  // A member whose .grad is not as the last pass left it, or whose requires_grad changed within a step: what is wrong.
  // first: no pass of the step has been. updates: step() asks, to which requires_grad is nothing any more.
  std::string find_meddling(bool first, bool updates) const;

  // Around a pass: autograd finds in .grad what it is to add to. keeps_graph: gradients stay there, with their graph,
  // for the next pass.
  void begin_pass(bool keeps_graph);
  void end_pass();
  // A gradient that another Engine's backward, or a plain one, left in member i's .grad goes away again. Where it was
  // added to one that waits with its graph, the two cannot be told apart: find_meddling() says so until drop().
  void drop_foreign(std::size_t i);
  // A pass in its middle, or a step, is over: nothing is kept any more.
  void drop();

  // What autograd has left in member i's .grad: dense, without a graph. Undefined: nothing, or nothing that is trained.
  at::Tensor arrived(std::size_t i) const;
  // Member i's .grad is `grad` from now on, and passes to come add to it. `view`: its buffer.
  void keep(std::size_t i, at::Tensor grad, const step::View& view);
  const at::Tensor& kept(std::size_t i) const { return kept_[i].grad; }
  const step::View& kept_view(std::size_t i) const { return kept_[i].view; }

 private:
  struct Kept {
    at::Tensor grad;
    step::View view;
  };

  const std::vector<ModelParameter>& members_;
  const std::string group_;
  bool trainable_;
  bool keeps_graph_ = false;
  std::string mixed_;  // a member whose waiting gradient has a foreign one in it
  std::vector<char> active_;
  std::vector<Kept> kept_;
  GradientGuard guard_;
};

}  // namespace zero::engine
