// See model_binding.h.
#include "engine/model_binding.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "engine/dtypes.h"
#include "torch_hooks/gradient_hook.h"
#include "torch_hooks/storage_access.h"

namespace zero::engine {

ModelBinding::Group::Group(const step::GroupFacts& facts, std::vector<ModelParameter> members)
    : facts(facts),
      members(std::move(members)),
      storages(this->members.size()),
      gradients(this->members, facts.name, facts.trainable) {
  const auto cut =
      std::find_if(this->members.begin(), this->members.end(), [](const ModelParameter& m) { return m.is_cut(); });
  cut_begin = cut == this->members.end()
                  ? facts.padded()
                  : facts.layout.parameter_offset(static_cast<std::size_t>(cut - this->members.begin()));
}

ModelBinding::ModelBinding(std::shared_ptr<EngineMemory> memory, const std::vector<step::GroupFacts>& groups,
                           std::vector<std::vector<ModelParameter>> members, observe::Trace& trace)
    : memory_(std::move(memory)), trace_(trace) {
  for (std::size_t g = 0; g < groups.size(); ++g)
    groups_.push_back(std::make_unique<Group>(groups[g], std::move(members[g])));
}

// --- parameters -------------------------------------------------------------------------------

void ModelBinding::bind(int index, step::View whole) {
  auto& g = group(index);
  const auto flat = memory_->buffers.tensor(whole);
  for (std::size_t i = 0; i < g.members.size(); ++i)
    torch_hooks::gather_storage(g.storages[i], flat, g.facts.layout.parameter_offset(i) * width(whole.dtype));
  if (!std::exchange(g.bound, true)) g.whole_trace.begin(trace_, observe::TraceKind::Whole);
}

void ModelBinding::release(const Group& g, std::size_t member) {
  torch_hooks::release_storage(g.storages[member],
                               "parameter " + g.members[member].name + " (group " + g.facts.name +
                                   ") was read past the dispatcher while it is sharded. Hint: open "
                                   "engine.gathered_parameters() around code that takes raw pointers.");
}

void ModelBinding::unbind(int index) {
  auto& g = group(index);
  for (std::size_t i = 0; i < g.members.size(); ++i) release(g, i);
  if (!std::exchange(g.bound, false) || g.members.empty()) return;
  g.whole_trace.end(g.facts.name,
                    g.facts.padded() * static_cast<std::int64_t>(g.members.front().tensor.element_size()));
}

void ModelBinding::values_changed(int index) {
  for (const auto& member : group(index).members)
    if (!member.tensor.is_inference()) member.tensor.unsafeGetTensorImpl()->bump_version();
}

at::Tensor ModelBinding::values(int index) const {
  const at::NoGradGuard no_grad;
  const auto& g = *groups_[static_cast<std::size_t>(index)];
  auto values = at::zeros({g.facts.padded()}, at::kFloat);
  for (std::size_t i = 0; i < g.members.size(); ++i)
    values.narrow(0, g.facts.layout.parameter_offset(i), g.facts.layout.parameter_numel(i))
        .copy_(g.members[i].tensor.detach().reshape({-1}));
  return values;
}

void ModelBinding::attach(int index, std::size_t i, step::View whole) {
  const at::NoGradGuard no_grad;
  auto& g = group(index);
  const auto dtype = scalar_type(g.facts.precision.param);
  const auto& member = g.members[i];
  const auto& tensor = member.tensor;
  const auto flat = whole ? memory_->buffers.tensor(whole) : at::Tensor();
  const auto size = static_cast<std::int64_t>(at::elementSize(dtype));
  const auto offset = g.facts.layout.parameter_offset(i) * size;
  // The parameter keeps its TensorImpl and, if the dtype is unchanged, its storage, because the program may hold views.
  // Otherwise both are replaced once, here.
  const auto bytes = static_cast<std::size_t>(member.numel() * size);
  const bool keeps = bytes > 0 && !member.is_cut() && tensor.scalar_type() == dtype && tensor.is_contiguous() &&
                     tensor.device() == memory_->buffers.setup().device && tensor.storage_offset() == 0 &&
                     tensor.storage().nbytes() == bytes;
  if (!keeps)
    tensor.set_data(whole ? torch_hooks::alias(flat, offset, member.part_sizes, dtype)
                          : torch_hooks::without_data(member.part_sizes, dtype, memory_->buffers.setup().device));
  else if (whole)
    torch_hooks::gather_storage(tensor.storage(), flat, offset);
  g.storages[i] = tensor.storage();
  if (!whole) release(g, i);
}

void ModelBinding::abandon(int index) noexcept {
  auto& g = group(index);
  for (std::size_t i = 0; i < g.storages.size(); ++i) {
    if (!g.storages[i]) continue;  // never attached
    torch_hooks::release_storage(g.storages[i], "parameter " + g.members[i].name +
                                                    " was sharded, and its Engine has ended, which had its values. "
                                                    "Hint: save a checkpoint or full_state_dict() "
                                                    "before a stage 3 Engine ends, and load it into a new model");
  }
}

std::optional<ModelBinding::Located> ModelBinding::find(const std::string& name) const {
  const auto is = [&](const ModelParameter& member, int place) {
    const auto named = [&](const std::string& own) {
      return (place < 0 ? own : member.expert->at(place, own)) == name;
    };
    return named(member.name) || std::any_of(member.aliases.begin(), member.aliases.end(), named);
  };
  for (std::size_t g = 0; g < groups_.size(); ++g)
    for (std::size_t i = 0; i < groups_[g]->members.size(); ++i) {
      const auto& member = groups_[g]->members[i];
      if (!member.expert) {
        if (is(member, -1)) return Located{static_cast<int>(g), i, -1, member.name, true};
        continue;
      }
      for (int place = 0; place < member.expert->ep_size; ++place)
        if (is(member, place))
          return Located{static_cast<int>(g), i, place, member.expert->at(place, member.name),
                         place == member.expert->place()};
    }
  return std::nullopt;
}

ModelBinding::Located ModelBinding::require(const std::string& where, const std::string& name) const {
  const auto found = find(name);
  if (!found) throw ConfigError(where + "got the name " + name + ", which no parameter of the model has");
  return *found;
}

// --- gradients --------------------------------------------------------------------------------

std::optional<ModelBinding::Arrived> ModelBinding::take_gradient(int index, int member) {
  auto& g = group(index);
  const auto i = static_cast<std::size_t>(member);
  auto grad = g.gradients.arrived(i);
  if (!grad.defined()) return std::nullopt;
  auto& buffers = memory_->buffers;
  const auto& parameter = g.members[i].tensor;
  grad = grad.contiguous();
  if (g.facts.grads == step::GradStorageKind::Autograd) {
    if (grad.scalar_type() != parameter.scalar_type()) grad = grad.to(parameter.scalar_type());
    if (const auto& kept = g.gradients.kept(i); kept.defined()) {
      if (kept.const_data_ptr() != grad.const_data_ptr())
        throw ConfigError("[Engine::backward] the gradient of " + g.members[i].name + " (group " + g.facts.name +
                          ") was replaced while backward ran. Hint: a hook may change a gradient, not .grad.");
      return Arrived{g.gradients.kept_view(i), true};
    }
    // Tensors that share the memory would change in the reduction and in later passes.
    if (!torch_hooks::owns_storage(grad)) grad = grad.clone();
  }
  const bool peer_readable = grad.numel() > 0 && buffers.holds(g.facts.axis, grad) && torch_hooks::owns_storage(grad);
  if (g.facts.grads != step::GradStorageKind::Autograd) parameter.mutable_grad() = at::Tensor();
  const step::View view{memory_->memory.register_foreign(), 0, grad.numel(), step_dtype(grad.scalar_type())};
  buffers.adopt(view.buffer, std::move(grad));
  return Arrived{view, peer_readable};
}

// A block that becomes a .grad is returned with the last tensor that references it.
void ModelBinding::set_gradient(int index, int member, step::View kept) {
  auto& g = group(index);
  const auto i = static_cast<std::size_t>(member);
  auto grad = memory_->buffers.shaped(kept);
  if (const int block = memory_->buffers.block_at(grad.const_data_ptr()); block == kept.buffer && block != 0) {
    lent_blocks_.insert(block);
    grad = at::from_blob(
        grad.mutable_data_ptr(), g.members[i].tensor.sizes(),
        [memory = memory_, block](void*) { memory->memory.give_block(block); },
        at::TensorOptions().dtype(grad.scalar_type()));
  }
  if (const auto sizes = g.members[i].tensor.sizes(); grad.sizes() != sizes) grad = grad.view(sizes);
  g.gradients.keep(i, std::move(grad), kept);
}

void ModelBinding::drop_gradients(int index) { group(index).gradients.drop(); }

void ModelBinding::release_gradient(step::View gradient) {
  if (memory_->buffers.drop(gradient.buffer)) return;
  if (lent_blocks_.erase(gradient.buffer) == 0) memory_->memory.give_block(gradient.buffer);
}

}  // namespace zero::engine
