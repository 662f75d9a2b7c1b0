// See parameter_access.h.
#include "engine/parameter_access.h"

#include <ATen/ATen.h>

#include "base/check.h"
#include "engine/checks.h"
#include "engine/dtypes.h"
#include "engine/rank_agreement.h"
#include "engine/stepper.h"
#include "engine/tensor_parts.h"

namespace zero::engine {
namespace {

std::string text_of(const at::Tensor& values) {
  return values.defined() ? base::join(values.toString(), values.sizes()) : "an undefined tensor";
}

}  // namespace

// --- values that a program passes: their checks and exchange -----------------------------------------

sharding::ShardLayout::Piece piece_of(const step::GroupFacts& facts, std::size_t member, std::int64_t begin,
                                      std::int64_t numel) {
  for (const auto& piece : facts.layout.pieces(begin, numel))
    if (piece.parameter == member) return piece;
  return {member, 0, 0, 0};
}

sharding::ShardLayout::Piece shard_of(const step::RunFacts& run, const step::GroupFacts& facts, std::size_t member) {
  return piece_of(facts, member, run.shard_begin(facts), facts.shard());
}

sharding::ShardLayout::Piece owned_of(const step::RunFacts& run, const step::GroupFacts& facts, std::size_t member) {
  return piece_of(facts, member, run.owned_begin(facts), facts.owned());
}

void require_whole(const std::string& where, const ModelParameter& parameter, const at::Tensor& values) {
  if (!values.defined() || values.sizes() != at::IntArrayRef(parameter.sizes) || !values.is_floating_point())
    throw ConfigError(where + base::join("got ", text_of(values), " for ", parameter.name,
                                         ", expected floating-point values of shape ",
                                         at::IntArrayRef(parameter.sizes)));
}

void require_shard(const std::string& where, const ModelParameter& parameter, std::int64_t numel,
                   const at::Tensor& values) {
  if (!values.defined() || values.numel() != numel || !values.is_floating_point())
    throw ConfigError(where + base::join("got ", text_of(values), " for ", parameter.name, ", expected the ", numel,
                                         " floating-point elements of this rank's shard"));
}

at::Tensor values_of_rank_0(const Parts& parts, const ModelParameter& parameter, const at::Tensor& values) {
  auto flat =
      values.detach().to(parts.plan.device, at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous().view({-1});
  if (parts.job.comm->size() > 1 && flat.numel() > 0) parts.job.comm->broadcast(flat, 0)->wait();
  return part_of(parameter, flat, parts.ranks.tensor->rank()).view({-1});
}

at::Tensor values_of_shards(const Parts& parts, const step::GroupFacts& facts, std::size_t member,
                            const at::Tensor& values) {
  // An expert's of other ranks has no values here, and takes none.
  const auto own = values.numel() == 0 ? piece_of(facts, member, 0, 0) : shard_of(parts.plan.run, facts, member);
  auto mine = at::zeros({facts.shard()}, at::TensorOptions().dtype(at::kFloat).device(parts.plan.device));
  mine.narrow(0, own.range_begin, own.numel).copy_(values.detach().reshape({-1}));
  auto whole = mine;
  if (auto& ranks = parts.ranks.of(facts); ranks.size() > 1 && facts.padded() > 0) {
    whole = at::empty({facts.padded()}, mine.options());
    ranks.all_gather(whole, mine)->wait();
  }
  return whole.narrow(0, facts.layout.parameter_offset(member), facts.layout.parameter_numel(member));
}

at::Tensor values_of_owner(const Parts& parts, const ModelBinding::Located& parameter, const at::Tensor& values) {
  if (parameter.place < 0 || values.numel() == 0) return values;
  const auto& member = parts.binding().group(parameter.group).members[parameter.member];
  auto result = values.contiguous().clone();
  parts.experts->expert_group(member.expert->ep_size).broadcast(result.view({-1}), parameter.place)->wait();
  return result;
}

// --- states ------------------------------------------------------------------------------------------

std::vector<std::string> ParameterStates::names(const std::string& parameter) const {
  const auto located = p_.binding().require(p_.where("state_names"), parameter);
  const auto& facts = p_.program->groups()[static_cast<std::size_t>(located.group)]->facts;
  return facts.trainable ? facts.states : std::vector<std::string>();
}

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
  for (int slot = 0; slot < group.facts.num_slots(); ++slot) {
    const auto& name = group.facts.states[static_cast<std::size_t>(slot)];
    names += ", " + name;
    if (state == name) index = slot + 1;
  }
  if (index < 0) throw ConfigError(p_.where(call) + "got the state " + state + ", expected one of " + names);
  const auto own = located.here ? shard_of(p_.plan.run, group.facts, member) : piece_of(group.facts, member, 0, 0);
  return {group, p_.binding().group(located.group).members[member], member, index, own, located};
}

ParameterStates::Place ParameterStates::agreed(const char* call, const std::string& parameter, const std::string& state,
                                               const std::function<void(const Place&)>& check) {
  std::optional<Place> place;
  agree_on(p_.relay, *p_.job.comm, call, p_.where(call) + "the state asked for", [&] {
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
    return values_of_owner(p_, place.located, whole_of(place.parameter, part, *p_.ranks.tensor))
        .to(p_.plan.device, at::kFloat, /*non_blocking=*/false, /*copy=*/true);
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
      const auto begin = (facts.sharding.params ? 0 : p_.plan.run.shard_begin(facts)) + place.own.range_begin;
      const auto values = states_.read_params(place.group, begin, place.own.numel);
      return {place.own.parameter_begin, values.to(values.device(), at::kFloat, false, /*copy=*/true)};
    }
    const auto begin = p_.plan.run.shard_begin(facts) - p_.plan.run.owned_begin(facts) + place.own.range_begin;
    const auto values = states_.read(place.group, place.state, begin, place.own.numel);
    return {place.own.parameter_begin, values.to(values.device(), at::kFloat, false, /*copy=*/true)};
  });
}

void ParameterStates::require_replaceable(const char* call) const {
  p_.relay.keeping([&] {
    checks_.require_between_passes(call);
    checks_.require_no_scope(call, /*reading_too=*/true);
  });
}

// Every rank has the same values of the whole parameter.
void ParameterStates::replace(const char* call, const Place& place, const at::Tensor& flat) {
  if (p_.job.comm->size() > 1) p_.job.comm->barrier();  // no rank reads a shard in place any more
  stepper_.begin_replacing(call);
  p_.progress.worth_keeping = true;
  const auto& facts = place.group.facts;
  if (!place.located.here) {
    // Another rank has the expert.
  } else if (facts.trainable) {
    const auto owned = owned_of(p_.plan.run, facts, place.member);
    states_.write(place.group, place.state, owned.range_begin, flat.narrow(0, owned.parameter_begin, owned.numel));
  } else {
    const auto stored =
        piece_of(facts, place.member, facts.sharding.params ? p_.plan.run.shard_begin(facts) : 0, facts.resting());
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

// --- reduced gradients -------------------------------------------------------------------------------

std::pair<std::int64_t, at::Tensor> reduced_gradient(const Parts& parts, int index, std::size_t member) {
  const auto& group = *parts.program->groups()[static_cast<std::size_t>(index)];
  const auto& facts = group.facts;
  const auto shard_begin = parts.plan.run.shard_begin(facts);
  const auto options = at::TensorOptions().dtype(scalar_type(facts.precision.grad)).device(parts.plan.device);
  for (const auto& piece : facts.layout.pieces(shard_begin, facts.shard())) {
    if (piece.parameter != member) continue;
    auto view = group.grads->sum();
    auto begin = piece.range_begin;
    if (!view) {
      view = group.grads->kept(static_cast<int>(member));
      begin = piece.parameter_begin;
    } else if (view.numel != facts.shard()) {
      begin += shard_begin;
    }
    return {piece.parameter_begin,
            view ? parts.memory->buffers.tensor(view.part(begin, piece.numel)) : at::zeros({piece.numel}, options)};
  }
  return {0, at::empty({0}, options)};
}

std::optional<ParameterGradients::Place> ParameterGradients::find(const char* call,
                                                                  const std::string& parameter) const {
  checks_.require_usable(call);
  const auto& accumulated = p_.accumulated();
  const bool counted = p_.program->counts_micro_batches();
  if (accumulated.open ||
      (counted ? accumulated.micro_batches != p_.plan.batch.accumulation : accumulated.micro_batches == 0))
    throw ConfigError(p_.where(call) + base::join("called after ", accumulated.micro_batches,
                                                  counted ? base::join(" of ", p_.plan.batch.accumulation) : "",
                                                  " micro-batches", accumulated.open ? " and within another" : "",
                                                  ", expected between the last backward() and step()"));
  const auto located = p_.binding().require(p_.where(call), parameter);
  const auto& bound = p_.binding().group(located.group);
  if (!bound.facts.trainable || (located.here && !bound.gradients.active(located.member))) return std::nullopt;
  return Place{located.group, located.member, bound.members[located.member], located};
}

OwnShard ParameterGradients::get_own(const std::string& parameter) {
  return p_.relay.keeping([&]() -> OwnShard {
    constexpr const char* kCall = "own_gradient";
    const auto place = find(kCall, parameter);
    if (!p_.program->counts_micro_batches() && !p_.accumulated().closed)
      throw ConfigError(p_.where(kCall) +
                        "called before a collective call has reduced the gradients. Hint: with "
                        "libzero.managed_gradient_accumulation false, call gradient() or set_gradient() on every rank "
                        "first.");
    if (!place) return {};
    if (!place->located.here) return {0, at::empty({0}, at::TensorOptions().dtype(at::kFloat).device(p_.plan.device))};
    const at::NoGradGuard no_grad;
    const auto [begin, values] = reduced_gradient(p_, place->group, place->member);
    return {begin, values.to(at::kFloat) * unscale()};
  });
}

void ParameterGradients::close(const char* call, const std::string& parameter) {
  p_.relay.keeping([&] { find(call, parameter); });
  p_.relay.reporting([&] { p_.program->close_accumulation(); });
}

// Whether a parameter has a gradient; of an expert, on the ranks that have it.
bool ParameterGradients::is_trained(const std::string& parameter, const OwnShard& own) const {
  const auto located = p_.binding().require("", parameter);
  if (located.place < 0) return own.values.defined();
  const auto& member = p_.binding().group(located.group).members[located.member];
  const auto all =
      p_.experts->expert_group(member.expert->ep_size).all_gather_bytes(own.values.defined() ? "trained" : "");
  return !all[static_cast<std::size_t>(located.place)].empty();
}

at::Tensor ParameterGradients::get(const std::string& parameter) {
  close("gradient", parameter);
  const auto own = get_own(parameter);
  return p_.relay.reporting([&]() -> at::Tensor {
    if (!is_trained(parameter, own)) return {};
    const at::NoGradGuard no_grad;
    const auto located = p_.binding().require("", parameter);
    const auto& bound = p_.binding().group(located.group);
    const auto& member = bound.members[located.member];
    // Each element belongs to one rank and is zero on the others.
    auto part = at::zeros({member.numel()}, own.values.options().device(p_.plan.device));
    part.narrow(0, own.begin, own.values.numel()).copy_(own.values);
    if (auto& ranks = p_.ranks.of(bound.facts); ranks.size() > 1 && part.numel() > 0) ranks.all_reduce(part)->wait();
    return values_of_owner(p_, located, whole_of(member, part, *p_.ranks.tensor));
  });
}

ParameterGradients::Place ParameterGradients::agreed(const char* call, const std::string& parameter,
                                                     const std::function<void(const Place&)>& check) {
  std::optional<Place> place;
  agree_on(p_.relay, *p_.job.comm, call, p_.where(call) + "the gradient to replace", [&] {
    const auto found = find(call, parameter);
    if (!found) throw ConfigError(p_.where(call) + parameter + " has no gradient: it is frozen");
    check(place.emplace(*found));
    return found->located.name + "\n";
  });
  p_.relay.reporting([&] { p_.program->close_accumulation(); });
  p_.program->forget_norm();
  return *place;
}

// Every rank has the same values of the whole parameter.
void ParameterGradients::replace(const Place& place, const at::Tensor& flat) {
  if (!place.located.here) return;
  const auto owned = owned_of(p_.plan.run, facts(place), place.member);
  if (owned.numel == 0) return;
  const auto values = flat.narrow(0, owned.parameter_begin, owned.numel) / unscale();
  auto& buffers = p_.memory->buffers;
  auto& gradients = p_.binding().group(place.group).gradients;
  const step::View view{p_.memory->memory.register_foreign(), 0, owned.numel, step::Dtype::F32};
  buffers.adopt(view.buffer, values);
  gradients.begin_pass(/*keeps_graph=*/false);
  const auto end = [&] {
    gradients.end_pass();
    buffers.drop(view.buffer);
  };
  try {
    p_.program->groups()[static_cast<std::size_t>(place.group)]->grads->replace(static_cast<int>(place.member),
                                                                                owned.parameter_begin, view);
  } catch (...) {
    end();
    throw;
  }
  end();
}

void ParameterGradients::set(const std::string& parameter, const at::Tensor& values) {
  constexpr const char* kCall = "set_gradient";
  const auto place =
      agreed(kCall, parameter, [&](const Place& found) { require_whole(p_.where(kCall), found.parameter, values); });
  p_.relay.reporting([&] {
    const at::NoGradGuard no_grad;
    replace(place, values_of_rank_0(p_, place.parameter, values));
  });
}

void ParameterGradients::set_own(const std::string& parameter, const at::Tensor& values) {
  constexpr const char* kCall = "set_own_gradient";
  const auto place = agreed(kCall, parameter, [&](const Place& found) {
    require_shard(p_.where(kCall), found.parameter,
                  found.located.here ? shard_of(p_.plan.run, facts(found), found.member).numel : 0, values);
  });
  p_.relay.reporting([&] {
    const at::NoGradGuard no_grad;
    replace(place, values_of_shards(p_, facts(place), place.member, values));
  });
}

}  // namespace zero::engine
