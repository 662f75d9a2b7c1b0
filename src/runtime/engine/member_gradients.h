// What autograd brings to the members of a group: whose gradients are awaited, what of them stays where autograd left
// it, and what a program finds in .grad meanwhile. How gradients are flattened and reduced is ParamGroup's.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "engine/gradient_guard.h"
#include "engine/group_context.h"
#include "engine/units.h"

namespace zero::engine {

class MemberGradients {
 public:
  // `members` outlive this; `group` is its name, for messages.
  MemberGradients(const std::vector<ModelParameter>& members, const GroupContext& context, std::string group,
                  bool trainable);

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
  bool keeps_graph() const { return keeps_graph_; }
  // A gradient that another Engine's backward, or a plain one, left in member i's .grad goes away again. Where it was
  // added to one that waits with its graph, the two cannot be told apart: find_meddling() says so until drop().
  void drop_foreign(std::size_t i);
  // A pass in its middle, or a step, is over: nothing is kept any more.
  void drop();

  // The gradient flat in the wire's dtype, where the other ranks can read it.
  at::Tensor readable(const at::Tensor& grad) const;

  // --- with GroupContext::direct_gradients: autograd's own .grad is the kept gradient ---
  // Member i's .grad is `grad` from now on, and passes to come add to it. adds: it is what was kept, or nothing was.
  // take_squares: while it is in the cache.
  void keep(std::size_t i, at::Tensor grad, bool adds, bool take_squares);
  // Where nothing is kept and other ranks read what is.
  void keep_zeros(std::size_t i, std::int64_t numel);
  const at::Tensor& kept(std::size_t i) const { return kept_[i].grad; }
  // A copy of what is kept, until forget_copy(); go_back() makes it what is kept again.
  void copy_kept();
  void go_back();
  void forget_copy();
  double sum_of_squares() const;

 private:
  struct Kept {
    at::Tensor grad;
    std::int64_t booked = 0;  // bytes
    double squares = -1;      // negative: not known yet
  };
  void book(Kept& kept);

  const std::vector<ModelParameter>& members_;
  const GroupContext& context_;
  const std::string group_;
  bool trainable_;
  bool keeps_graph_ = false;
  std::string mixed_;  // a member whose waiting gradient has a foreign one in it
  std::vector<char> active_;
  std::vector<Kept> kept_;
  std::vector<at::Tensor> copies_;  // by member
  GradientGuard guard_;
};

}  // namespace zero::engine
