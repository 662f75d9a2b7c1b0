// See parameter_states.h.
#include "engine/parameter_states.h"

#include <ATen/ATen.h>

#include <optional>

#include "base/check.h"
#include "engine/gathered_state.h"
#include "engine/parameter_values.h"
#include "engine/rank_agreement.h"
#include "engine/tensor_parts.h"

namespace zero::engine {
ParameterStates::Place ParameterStates::find(const char* call, const std::string& parameter,
                                             const std::string& state) const {
  const auto located = p_.binding().require(p_.where(call), parameter);
  const auto member = located.member;
  const auto& group = *p_.program->groups()[static_cast<std::size_t>(located.group)];
  if (!group.facts.trainable && state != "master")
    throw ConfigError(p_.where(call) + "got the state " + state + ", but " + parameter +
                      " has only its values, \"master\": it is frozen, or no backward() followed its "
                      "requires_grad_().");
  int index = state == "master" ? kMaster : -1;
  std::string names = "master";
  for (int slot = 0; slot < p_.run.num_slots; ++slot) {
    names += std::string(", ") + p_.optimizer->slot_name(slot);
    if (state == p_.optimizer->slot_name(slot)) index = slot + 1;
  }
  if (index < 0) throw ConfigError(p_.where(call) + "got the state " + state + ", expected one of " + names);
  const auto own = located.here ? shard_of(p_, group.facts, member) : piece_of(group.facts, member, 0, 0);
  return {group, p_.binding().group(located.group).members[member], member, index, own, located};
}

ParameterStates::Place ParameterStates::agreed(const char* call, const std::string& parameter, const std::string& state,
                                               const std::function<void(const Place&)>& check) {
  std::optional<Place> place;
  agree_on(p_.relay, *p_.comm, call, p_.where(call) + "the state asked for", [&] {
    place.emplace(find(call, parameter, state));
    check(*place);
    return state + " of " + place->located.name + "\n";
  });
  return *place;
}

at::Tensor ParameterStates::get(const std::string& parameter, const std::string& state) {
  constexpr const char* kCall = "parameter_state";
  p_.relay.keeping([&] { checks_.require_usable(kCall); });
  const auto place = agreed(kCall, parameter, state, [](const Place&) {});
  return p_.relay.reporting([&] {
    stepper_.flush();
    const at::NoGradGuard no_grad;
    const auto& layout = place.group.facts.layout;
    const auto part = gathered_state(p_, place.group, place.state)
                          .narrow(0, layout.parameter_offset(place.member), layout.parameter_numel(place.member));
    return values_of_owner(p_, place.located, whole_of(place.parameter, part, *p_.tensor_group))
        .to(p_.device, at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  });
}

OwnShard ParameterStates::get_own(const std::string& parameter, const std::string& state) {
  constexpr const char* kCall = "own_parameter_state";
  return p_.relay.keeping([&]() -> OwnShard {
    checks_.require_usable(kCall);
    if (p_.program->update_pending())
      throw ConfigError(p_.where(kCall) +
                        "called while a delayed update is on its way. Hint: call engine.flush() on every rank before.");
    p_.program->optimizer().settle();  // writes to files
    const auto place = find(kCall, parameter, state);
    const auto& facts = place.group.facts;
    const at::NoGradGuard no_grad;
    if (!facts.trainable) {
      const auto begin = (facts.sharding.params ? 0 : p_.run.shard_begin(facts)) + place.own.range_begin;
      const auto values = states_.read_params(place.group, begin, place.own.numel);
      return {place.own.parameter_begin, values.to(values.device(), at::kFloat, false, /*copy=*/true)};
    }
    const auto begin = p_.run.shard_begin(facts) - p_.run.owned_begin(facts) + place.own.range_begin;
    return {place.own.parameter_begin, states_.read(place.group, place.state, begin, place.own.numel).clone()};
  });
}

void ParameterStates::require_replaceable(const char* call) const {
  p_.relay.keeping([&] {
    checks_.require_boundary(call);
    checks_.require_no_scope(call, /*reading_too=*/true);
  });
}

// Every rank has the same values of the whole parameter.
void ParameterStates::replace(const char* call, const Place& place, const at::Tensor& flat) {
  if (p_.comm->size() > 1) p_.comm->barrier();  // no rank reads a shard in place any more
  stepper_.begin_replacing(call);
  p_.progress.worth_keeping = true;
  const auto& facts = place.group.facts;
  if (!place.located.here) {
    // Another rank has the expert.
  } else if (facts.trainable) {
    const auto owned = owned_of(p_, facts, place.member);
    states_.write(place.group, place.state, owned.range_begin, flat.narrow(0, owned.parameter_begin, owned.numel));
  } else {
    const auto stored =
        piece_of(facts, place.member, facts.sharding.params ? p_.run.shard_begin(facts) : 0, facts.resting());
    states_.write_params(place.group, stored.range_begin, flat.narrow(0, stored.parameter_begin, stored.numel));
  }
  if (place.state == kMaster) p_.program->end_replacing(place.group.index);
}

void ParameterStates::set(const std::string& parameter, const std::string& state, const at::Tensor& values) {
  constexpr const char* kCall = "set_parameter_state";
  require_replaceable(kCall);
  const auto place = agreed(kCall, parameter, state,
                            [&](const Place& found) { require_whole(p_.where(kCall), found.parameter, values); });
  p_.relay.reporting([&] {
    stepper_.flush();
    const at::NoGradGuard no_grad;
    replace(kCall, place, values_of_rank_0(p_, place.parameter, values));
  });
}

void ParameterStates::set_own(const std::string& parameter, const std::string& state, const at::Tensor& values) {
  constexpr const char* kCall = "set_own_parameter_state";
  require_replaceable(kCall);
  const auto place = agreed(kCall, parameter, state, [&](const Place& found) {
    require_shard(p_.where(kCall), found.parameter, found.own.numel, values);
  });
  p_.relay.reporting([&] {
    stepper_.flush();
    const at::NoGradGuard no_grad;
    replace(kCall, place, values_of_shards(p_, place.group.facts, place.member, values));
  });
}

}  // namespace zero::engine
