// See group.h.
#include "step/group.h"

#include <algorithm>

namespace zero::step {

Group::Group(const Context& context, const GroupFacts& facts, int index)
    : context(context),
      facts(facts),
      index(index),
      params(ParamStorage::make(context, facts, index)),
      grads(GradStorage::make(context, facts, index)) {
  make_states();
}

Group::~Group() { become_frozen(); }

void Group::make_states() {
  const auto& c = context;
  for (const auto& segment : facts.segments) {
    const auto rest = [&](Purpose purpose, Role role, Dtype dtype, std::int64_t numel) {
      return c.memory.rest(
          {.place = c.place_of(segment.tier), .tier = segment.tier, .purpose = purpose, .role = role, .group = index},
          numel, dtype);
    };
    auto& target = states.emplace_back();
    target.master = segment.aliases_master
                        ? params->resting_part(segment.begin, segment.numel)
                        : rest(Purpose::MasterParameters, Role::Master, facts.precision.master, segment.numel);
    for (int k = 0; k < facts.num_slots(); ++k)
      target.slots[k] = rest(Purpose::OptimizerStates, Role::OptimizerState, facts.precision.slots,
                             slot_numel(facts.precision.slots, segment.numel));
  }
  if (!facts.delayed) return;
  pending_params = c.memory.rest({.place = c.host(),
                                  .tier = Tier::Host,
                                  .purpose = Purpose::Parameters,
                                  .role = Role::PendingParams,
                                  .group = index},
                                 facts.owned(), facts.precision.param);
  c.backend.tensors.fill(pending_params, 0);  // updates do not write padding, which must be zero
}

void Group::become_frozen() {
  grads.reset();
  for (auto& target : states) {
    if (target.master.buffer != params->resting().buffer) context.memory.give(target.master);
    for (auto& slot : target.slots) context.memory.give(slot);
  }
  states.clear();
  context.memory.give(pending_params);
}

void Group::become_trainable() {
  grads = GradStorage::make(context, facts, index);
  make_states();
  for (std::size_t s = 0; s < states.size(); ++s) {
    const auto& segment = facts.segments[s];
    if (!segment.aliases_master) copy(states[s].master, params->resting_part(segment.begin, segment.numel));
  }
  // A pending update does not include this group.
  if (pending_params) copy(pending_params, params->resting_part(0, pending_params.numel));
  fill_slots();
}

std::vector<Group::Target> Group::targets() const {
  const auto& resting = params->resting();
  std::vector<Target> result{
      {OpKind::Store, facts.param_tier, resting, facts.sharding.params ? context.facts.shard_begin(facts) : 0}};
  for (std::size_t s = 0; s < states.size(); ++s) {
    const auto& segment = facts.segments[s];
    if (!segment.aliases_master)
      result.push_back(
          {OpKind::StoreStates, segment.tier, states[s].master, context.facts.owned_begin(facts) + segment.begin});
  }
  return result;
}

void Group::initialise_part(std::int64_t begin, View values) {
  for (const auto& target : targets()) {
    const auto from = std::max(begin, target.begin),
               end = std::min(begin + values.numel, target.begin + target.to.numel);
    if (from < end) copy(target.to.part(from - target.begin, end - from), values.part(from - begin, end - from));
  }
}

void Group::initialise(View values) {
  initialise_part(0, values);
  finish_initialisation();
}

void Group::complete_initialisation() {
  for (const auto& target : targets()) {
    if (target.tier == Tier::File) continue;  // files are zero-initialized
    for (const auto& gap : facts.layout.gaps()) {
      const auto from = std::max(gap.begin, target.begin),
                 end = std::min(gap.begin + gap.numel, target.begin + target.to.numel);
      if (from < end) context.backend.tensors.fill(target.to.part(from - target.begin, end - from), 0);
    }
  }
  finish_initialisation();
}

void Group::finish_initialisation() {
  for (const auto& target : targets())
    if (target.tier == Tier::File)
      context.observer.issued({.kind = target.store,
                               .reason = OpReason::InitialValues,
                               .group = index,
                               .bytes = target.to.bytes(),
                               .from = Tier::Host,
                               .to = Tier::File});
  fill_slots();
  params->mark_updated();
}

void Group::fill_slots() {
  const auto first = context.facts.slot_initial_value;
  for (std::size_t s = 0; s < states.size(); ++s) {
    if (facts.segments[s].tier == Tier::File && first == 0) continue;  // files are zero-initialized
    for (int k = 0; k < facts.num_slots(); ++k) context.backend.tensors.fill(states[s].slots[k], first);
  }
}

void Group::params_from_pending() {
  if (!pending_params) return;
  const auto seen = context.observer.issued({.kind = facts.in_file() ? OpKind::Store : OpKind::Copy,
                                             .reason = OpReason::NewValues,
                                             .group = index,
                                             .bytes = pending_params.bytes(),
                                             .from = Tier::Host,
                                             .to = facts.param_tier});
  copy(params->resting_part(0, pending_params.numel), pending_params);
  params->mark_updated();
}

void Group::params_from_masters() {
  for (std::size_t s = 0; s < states.size(); ++s) {
    const auto& segment = facts.segments[s];
    if (!segment.aliases_master) copy(params->resting_part(segment.begin, segment.numel), states[s].master);
  }
  params->mark_updated();
}

}  // namespace zero::step
