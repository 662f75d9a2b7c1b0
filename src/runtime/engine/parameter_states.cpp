// See parameter_states.h.
#include "engine/parameter_states.h"

#include <ATen/ATen.h>

#include "base/check.h"

namespace zero::engine {
namespace {

sharding::ShardLayout::Piece piece_of(const step::GroupFacts& facts, std::size_t member, std::int64_t begin,
                                      std::int64_t numel) {
  for (const auto& piece : facts.layout.pieces(begin, numel))
    if (piece.parameter == member) return piece;
  return {member, 0, 0, 0};
}

}  // namespace

at::Tensor gather_state(const Parts& parts, const step::Group& group, int state) {
  const StateAccess states(parts.memory->buffers);
  const auto& facts = group.facts;
  const bool frozen = !facts.trainable;
  const auto resting = [&] { return states.read_params(group, 0, facts.resting()); };
  if (frozen ? !facts.sharding.params : !facts.sharding.optimizer)
    return (frozen ? resting() : states.read(group, state, 0, facts.owned())).to(at::kFloat);
  if (facts.padded() == 0) return at::empty({0}, at::kFloat);
  const auto part = (frozen ? resting() : states.shard(group, state)).to(parts.device, at::kFloat);
  auto whole = at::empty({facts.padded()}, part.options());
  parts.comm->all_gather(whole, part.contiguous())->wait();
  return whole;
}

ParameterStates::Place ParameterStates::find(const char* call, const std::string& parameter,
                                             const std::string& state) const {
  const auto [g, member] = p_.binding().require(p_.where(call), parameter);
  const auto& group = *p_.program->groups()[static_cast<std::size_t>(g)];
  if (!group.facts.trainable)
    throw ConfigError(p_.where(call) + parameter +
                      " is frozen, and has no states. Hint: gathered_parameters() reads and writes its values.");
  int index = state == "master" ? kMaster : -1;
  std::string names = "master";
  for (int slot = 0; slot < p_.run.num_slots; ++slot) {
    names += std::string(", ") + p_.optimizer->slot_name(slot);
    if (state == p_.optimizer->slot_name(slot)) index = slot + 1;
  }
  if (index < 0) throw ConfigError(p_.where(call) + "got the state " + state + ", expected one of " + names);
  return {group, p_.binding().group(g).members[member], member, index,
          piece_of(group.facts, member, p_.run.shard_begin(group.facts), group.facts.shard())};
}

at::Tensor ParameterStates::read_own(const Place& place) const {
  const auto& facts = place.group.facts;
  const auto begin = p_.run.shard_begin(facts) - p_.run.owned_begin(facts) + place.own.range_begin;
  return states_.read(place.group, place.state, begin, place.own.numel);
}

at::Tensor ParameterStates::get(const std::string& parameter, const std::string& state) {
  constexpr const char* kCall = "parameter_state";
  const auto place = p_.relay.keeping([&] {
    checks_.require_usable(kCall);
    return find(kCall, parameter, state);
  });
  return p_.relay.reporting([&] {
    stepper_.flush();
    const at::NoGradGuard no_grad;
    const auto& layout = place.group.facts.layout;
    return gather_state(p_, place.group, place.state)
        .narrow(0, layout.parameter_offset(place.member), layout.parameter_numel(place.member))
        .view(place.parameter.tensor.sizes())
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
    const auto place = find(kCall, parameter, state);
    const at::NoGradGuard no_grad;
    return {place.own.parameter_begin, read_own(place).clone()};
  });
}

// Every rank has the same values of the whole parameter.
void ParameterStates::replace(const char* call, const Place& place, const at::Tensor& flat) {
  if (p_.comm->size() > 1) p_.comm->barrier();  // no rank reads a shard in place any more
  stepper_.begin_replacing(call);
  const auto& facts = place.group.facts;
  const auto owned = piece_of(facts, place.member, p_.run.owned_begin(facts), facts.owned());
  states_.write(place.group, place.state, owned.range_begin, flat.narrow(0, owned.parameter_begin, owned.numel));
  if (place.state == kMaster) p_.program->end_replacing(place.group.index);
}

void ParameterStates::set(const std::string& parameter, const std::string& state, const at::Tensor& values) {
  constexpr const char* kCall = "set_parameter_state";
  const auto place = p_.relay.keeping([&] {
    checks_.require_boundary(kCall);
    checks_.require_no_scope(kCall, /*reading_too=*/true);
    auto found = find(kCall, parameter, state);
    if (!values.defined() || values.sizes() != found.parameter.tensor.sizes() || !values.is_floating_point())
      throw ConfigError(p_.where(kCall) + base::join("got ", values.toString(), values.sizes(), " for ", parameter,
                                                     ", expected floating-point values of shape ",
                                                     found.parameter.tensor.sizes()));
    return found;
  });
  p_.relay.reporting([&] {
    stepper_.flush();
    const at::NoGradGuard no_grad;
    auto flat =
        values.detach().to(p_.device, at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous().view({-1});
    if (p_.comm->size() > 1) p_.comm->broadcast(flat, 0)->wait();
    replace(kCall, place, flat);
  });
}

void ParameterStates::set_own(const std::string& parameter, const std::string& state, const at::Tensor& values) {
  constexpr const char* kCall = "set_own_parameter_state";
  const auto place = p_.relay.keeping([&] {
    checks_.require_boundary(kCall);
    checks_.require_no_scope(kCall, /*reading_too=*/true);
    auto found = find(kCall, parameter, state);
    if (!values.defined() || values.numel() != found.own.numel || !values.is_floating_point())
      throw ConfigError(p_.where(kCall) + base::join("got ", values.toString(), values.sizes(), " for ", parameter,
                                                     ", expected the ", found.own.numel,
                                                     " floating-point elements of this rank's shard"));
    return found;
  });
  p_.relay.reporting([&] {
    stepper_.flush();
    const at::NoGradGuard no_grad;
    const auto& facts = place.group.facts;
    auto mine = at::zeros({facts.shard()}, at::TensorOptions().dtype(at::kFloat).device(p_.device));
    mine.narrow(0, place.own.range_begin, place.own.numel).copy_(values.detach().reshape({-1}));
    auto whole = mine;
    if (p_.comm->size() > 1 && facts.padded() > 0) {
      whole = at::empty({facts.padded()}, mine.options());
      p_.comm->all_gather(whole, mine)->wait();
    }
    replace(kCall, place,
            whole.narrow(0, facts.layout.parameter_offset(place.member), facts.layout.parameter_numel(place.member)));
  });
}

}  // namespace zero::engine
