// One group of parameters with its states: parameters, gradients, masters and optimizer states.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "step/grad_storage.h"
#include "step/param_storage.h"

namespace zero::step {

// The part of an optimizer state with elements [at, at + count); of one in blocks the blocks that have them.
inline View slot_part(const View& slot, std::int64_t at, std::int64_t count) {
  if (slot.dtype != Dtype::U8) return slot.part(at, count);
  const auto inside = at % kernels::kStateBlock, first = at - inside;
  return slot.part(kernels::state_block_bytes(first), kernels::state_block_bytes(inside + count));
}

struct Group {
  // `context` and `facts` must outlive it.
  Group(const Context& context, const GroupFacts& facts, int index);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Initializes parameters, masters and optimizer states from fp32 `values` of all elements.
  void initialise(View values);
  // The same by and by: `values` of the elements from `begin` on; padding and optimizer states when all have been
  // given.
  void initialise_part(std::int64_t begin, View values);
  void complete_initialisation();
  // For a group that becomes trainable: allocates gradients, masters from the current parameters, and optimizer states.
  void become_trainable();
  // The opposite: frees these buffers.
  void become_frozen();
  // Copies the results of a delayed update into the parameters.
  void params_from_pending();
  // Copies masters into the parameters. No effect for a group without masters.
  void params_from_masters();

  const Context& context;
  const GroupFacts& facts;
  const int index;
  std::unique_ptr<ParamStorage> params;
  std::unique_ptr<GradStorage> grads;
  std::vector<UpdateTarget> states;  // by segment: the stored states, without param
  View pending_params;               // new values of a delayed update

 private:
  void copy(View to, View from) const { context.backend.tensors.copy(to, from, Lane::Compute); }
  // The stored copies of the initial values: parameters, and the masters that are not the parameters.
  struct Target {
    OpKind store;
    Tier tier;
    View to;
    std::int64_t begin;  // in the flat vector
  };
  std::vector<Target> targets() const;
  void make_states();
  void fill_slots();
  void finish_initialisation();
};
using Groups = std::vector<std::unique_ptr<Group>>;

}  // namespace zero::step
