// One group of parameters with all its states: parameters, gradients, masters and optimizer states.
#pragma once
#include <memory>
#include <vector>

#include "step/grad_storage.h"
#include "step/param_storage.h"

namespace zero::step {

struct Group {
  // `context` and `facts` outlive it.
  Group(const Context& context, const GroupFacts& facts, int index);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // First parameters, masters and optimizer states, from fp32 `values` of all its elements.
  void initialise(View values);
  // Of a group whose facts say so only now: gradients, and masters of the parameters as they rest.
  void become_trainable();
  // The opposite: what it makes is given back.
  void become_frozen();
  // What a delayed update has made becomes the parameters.
  void params_from_pending();
  // The parameters become the masters' values. A group without masters stays as it is.
  void params_from_masters();

  const Context& context;
  const GroupFacts& facts;
  const int index;
  std::unique_ptr<ParamStorage> params;
  std::unique_ptr<GradStorage> grads;
  std::vector<UpdateTarget> states;  // by segment: where they rest; without param
  View pending_params;               // new values of a delayed update

 private:
  void copy(View to, View from) const { context.backend.tensors.copy(to, from, Lane::Compute); }
  void make_states();
  void fill_slots();
  void observe_store(OpKind kind, Tier tier, View to) const;
};
using Groups = std::vector<std::unique_ptr<Group>>;

}  // namespace zero::step
