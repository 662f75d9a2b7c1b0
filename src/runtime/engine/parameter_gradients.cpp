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
  const auto located = p_.binding().require(p_.where(call), parameter);
  const auto& bound = p_.binding().group(located.group);
  if (!bound.facts.trainable || (located.here && !bound.gradients.active(located.member))) return std::nullopt;
  return Place{located.group, located.member, bound.members[located.member], located};
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
    if (!place->located.here) return {0, at::empty({0}, at::TensorOptions().dtype(at::kFloat).device(p_.device))};
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
    auto part = at::zeros({member.numel()}, own.values.options().device(p_.device));
    part.narrow(0, own.begin, own.values.numel()).copy_(own.values);
    if (auto& ranks = p_.ranks_of(bound.facts); ranks.size() > 1 && part.numel() > 0) ranks.all_reduce(part)->wait();
    return values_of_owner(p_, located, whole_of(member, part, *p_.tensor_group));
  });
}

ParameterGradients::Place ParameterGradients::agreed(const char* call, const std::string& parameter,
                                                     const std::function<void(const Place&)>& check) {
  std::optional<Place> place;
  agree_on(p_.relay, *p_.comm, call, p_.where(call) + "the gradient to replace", [&] {
    const auto found = find(call, parameter);
    if (!found) throw ConfigError(p_.where(call) + parameter + " has no gradient: it is frozen");
    check(place.emplace(*found));
    return found->located.name + "\n";
  });
  p_.relay.reporting([&] { p_.program->close_accumulation(); });
  return *place;
}

// Every rank has the same values of the whole parameter.
void ParameterGradients::replace(const Place& place, const at::Tensor& flat) {
  if (!place.located.here) return;
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
    require_shard(p_.where(kCall), found.parameter,
                  found.located.here ? shard_of(p_, facts(found), found.member).numel : 0, values);
  });
  p_.relay.reporting([&] {
    const at::NoGradGuard no_grad;
    replace(place, values_of_shards(p_, facts(place), place.member, values));
  });
}

}  // namespace zero::engine
