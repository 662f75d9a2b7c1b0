// See parameter_gradients.h.
#include "engine/parameter_gradients.h"

#include <ATen/ATen.h>

#include "base/check.h"
#include "engine/parameter_values.h"
#include "engine/rank_agreement.h"
#include "engine/reduced_gradient.h"
#include "engine/tensor_parts.h"

namespace zero::engine {

std::optional<ParameterGradients::Place> ParameterGradients::find(const char* call,
                                                                  const std::string& parameter) const {
  checks_.require_usable(call);
  const auto& accumulated = p_.accumulated();
  const bool counted = p_.settings.managed_gradient_accumulation;
  if (accumulated.open || (counted ? accumulated.micro_batches != p_.accumulation : accumulated.micro_batches == 0))
    throw ConfigError(p_.where(call) + base::join("called after ", accumulated.micro_batches,
                                                  counted ? base::join(" of ", p_.accumulation) : "", " micro-batches",
                                                  accumulated.open ? " and within another" : "",
                                                  ", expected between the last backward() and step()"));
  const auto [group, member] = p_.binding().require(p_.where(call), parameter);
  const auto& bound = p_.binding().group(group);
  if (!bound.facts.trainable || !bound.gradients.active(member)) return std::nullopt;
  return Place{group, member, bound.members[member]};
}

OwnShard ParameterGradients::get_own(const std::string& parameter) {
  return p_.relay.keeping([&]() -> OwnShard {
    constexpr const char* kCall = "own_gradient";
    const auto place = find(kCall, parameter);
    if (!p_.settings.managed_gradient_accumulation && !p_.accumulated().closed)
      throw ConfigError(p_.where(kCall) +
                        "called before a collective call has reduced the gradients. Hint: with "
                        "libzero.managed_gradient_accumulation false, call gradient() or set_gradient() on every rank "
                        "first.");
    if (!place) return {};
    const at::NoGradGuard no_grad;
    const auto [begin, values] = reduced_gradient(p_, place->group, place->member);
    return {begin, values.to(at::kFloat) * unscale()};
  });
}

void ParameterGradients::close(const char* call, const std::string& parameter) {
  p_.relay.keeping([&] { find(call, parameter); });
  p_.relay.reporting([&] { p_.program->close_accumulation(); });
}

at::Tensor ParameterGradients::get(const std::string& parameter) {
  close("gradient", parameter);
  const auto own = get_own(parameter);
  if (!own.values.defined()) return {};
  return p_.relay.reporting([&]() -> at::Tensor {
    const at::NoGradGuard no_grad;
    const auto& member = find("gradient", parameter)->parameter;
    // Each element belongs to one rank and is zero on the others.
    auto part = at::zeros({member.numel()}, own.values.options().device(p_.device));
    part.narrow(0, own.begin, own.values.numel()).copy_(own.values);
    if (p_.shard_group->size() > 1 && part.numel() > 0) p_.shard_group->all_reduce(part)->wait();
    return whole_of(member, part, *p_.tensor_group);
  });
}

ParameterGradients::Place ParameterGradients::agreed(const char* call, const std::string& parameter,
                                                     const std::function<void(const Place&)>& check) {
  std::optional<Place> place;
  agree_on(p_.relay, *p_.comm, call, p_.where(call) + "the gradient to replace", [&] {
    const auto found = find(call, parameter);
    if (!found) throw ConfigError(p_.where(call) + parameter + " has no gradient: it is frozen");
    check(place.emplace(*found));
    return found->parameter.name + "\n";
  });
  p_.relay.reporting([&] { p_.program->close_accumulation(); });
  return *place;
}

// Every rank has the same values of the whole parameter.
void ParameterGradients::replace(const Place& place, const at::Tensor& flat) {
  const auto owned = owned_of(p_, facts(place), place.member);
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
    require_shard(p_.where(kCall), found.parameter, shard_of(p_, facts(found), found.member).numel, values);
  });
  p_.relay.reporting([&] {
    const at::NoGradGuard no_grad;
    replace(place, values_of_shards(p_, facts(place), place.member, values));
  });
}

}  // namespace zero::engine
