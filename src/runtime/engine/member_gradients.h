// The .grad of a group's members: what autograd reads and writes there, and the guard that a program sees in between.
// The step program decides how gradients are stored and reduced.
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
  // `members` must outlive this. `group`: the group's name, for messages.
  MemberGradients(const std::vector<ModelParameter>& members, std::string group, bool trainable);

  // From now on, members without requires_grad get no gradient and no update. Call before a pass of a step. first: the
  // step's first one; in another one members are only added, since those that were trained have gradients.
  void choose_active(bool first);
  void set_trainable(bool trainable) { trainable_ = trainable; }
  bool activity_changed(bool first) const;
  // The member gets no update, whatever its requires_grad says; its .grad is the program's.
  void exclude(std::size_t i) { excluded_[i] = 1; }
  bool excluded(std::size_t i) const { return excluded_[i] != 0; }
  bool active(std::size_t i) const { return active_[i] != 0; }

  // Describes a member whose .grad was changed since the last pass; empty if there is none. first: before the step's
  // first pass.
  std::string find_meddling(bool first) const;

  // Around a pass: restores the .grad that autograd accumulates into. keeps_graph: gradients stay in .grad, with their
  // graph, for the next pass.
  void begin_pass(bool keeps_graph);
  void end_pass();
  // Removes a gradient that another Engine's backward, or a plain backward(), left in member i's .grad. If it was added
  // to a gradient that keeps its graph, the two cannot be separated: find_meddling() reports that until drop().
  void drop_foreign(std::size_t i);
  // Ends a step or an unfinished pass: releases everything kept.
  void drop();

  // The gradient that autograd left in member i's .grad: dense, without a graph. Undefined if there is none or the
  // member is not trained.
  at::Tensor arrived(std::size_t i) const;
  // Makes `grad` member i's .grad, which later passes accumulate into. `view`: its buffer.
  void keep(std::size_t i, at::Tensor grad, const step::View& view);
  const at::Tensor& kept(std::size_t i) const { return kept_[i].grad; }
  const step::View& kept_view(std::size_t i) const { return kept_[i].view; }

 private:
  struct Kept {
    at::Tensor grad;
    step::View view;
  };

  bool wanted(std::size_t i) const { return members_[i].tensor.requires_grad() && !excluded(i); }
  // One that is frozen within a step keeps the gradients that have arrived.
  bool takes_part(std::size_t i, bool first) const { return wanted(i) || (!first && active(i)); }

  const std::vector<ModelParameter>& members_;
  const std::string group_;
  bool trainable_;
  bool keeps_graph_ = false;
  std::string mixed_;  // a member whose kept gradient contains a foreign one
  std::vector<char> active_, excluded_;
  std::vector<Kept> kept_;
  GradientGuard guard_;
};

}  // namespace zero::engine
