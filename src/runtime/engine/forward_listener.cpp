// See forward_listener.h.
#include "engine/forward_listener.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "observe/status_page.h"
#include "torch_hooks/gradient_hook.h"
#include "torch_hooks/normal_mode.h"

namespace zero::engine {
namespace {

// The groups of one operator's parameters, each once, in order of first use.
template <class Members>
c10::SmallVector<int, 8> groups_of(const int* tags, int count, const Members& members) {
  c10::SmallVector<int, 8> groups;
  for (int i = 0; i < count; ++i) {
    const int group = members[static_cast<std::size_t>(tags[i])].group;
    // Lists of parameters are ordered by unit, so the last group is the most likely match.
    if (std::find(groups.rbegin(), groups.rend(), group) == groups.rend()) groups.push_back(group);
  }
  return groups;
}

}  // namespace

void ForwardListener::attach(const std::function<void(int, int)>& on_gradient) {
  const auto& groups = p_.binding().groups();
  for (int g = 0; g < static_cast<int>(groups.size()); ++g) {
    const auto& group = *groups[static_cast<std::size_t>(g)];
    for (int i = 0; i < static_cast<int>(group.members.size()); ++i) {
      const auto& tensor = group.members[static_cast<std::size_t>(i)].tensor;
      const int tag = static_cast<int>(members_.size());
      members_.push_back({g, i});
      torch_hooks::intercept(tensor, this, tag, handler_of(group.members[static_cast<std::size_t>(i)], tag));
      tensor.mutable_grad() = at::Tensor();  // from a backward before the Engine was constructed
      torch_hooks::set_gradient_hook(tensor, [on_gradient, g, i] { on_gradient(g, i); });
    }
  }
}

// null: operators read the parameter as it is.
torch_hooks::CallHandler* ForwardListener::handler_of(const ModelParameter& member, int tag) const {
  if (!p_.products || (!member.is_cut() && !member.cut.sum_gradient)) return nullptr;
  p_.products->add(tag, {member.name, member.cut});
  return p_.products.get();
}

void ForwardListener::detach() noexcept {
  end_forward();
  for (const auto& member : members_) {
    const auto& group = p_.binding().group(member.group);
    const auto i = static_cast<std::size_t>(member.index);
    const auto& tensor = group.members[i].tensor;
    if (torch_hooks::gradient_hook_of(tensor) == torch_hooks::HookPlace::Ours)
      torch_hooks::set_gradient_hook(tensor, nullptr);
    torch_hooks::stop_intercepting(tensor, group.storages[i]);
  }
  members_.clear();
}

// Whether a forward begins.
bool ForwardListener::begin_forward() {
  auto& progress = p_.progress;
  if (progress.in_forward || progress.in_backward || progress.in_forward.exchange(true)) return false;
  p_.trace.begin_phase(observe::TraceKind::Forward);
  if (p_.products) {
    const bool first = !std::exchange(compared_, true) || p_.job.settings.zero.sanity_checks;
    p_.products->begin_forward(/*compare=*/first);
    if (p_.activations) p_.activations->compare_inputs(first);
  }
  begin_phase();
  observe::status_page().set_step(p_.program->steps(), static_cast<int>(p_.accumulated().micro_batches));
  observe::status_page().set_phase(observe::StatusPhase::Forward);
  return true;
}

// A whole tensor in the place of a part would fail in libtorch, in an operator that is not intercepted. Looks at all
// parts when a forward begins, and when a parameter is used again, since evaluations follow one another without an end,
// at those of its group and of the next: so the parts of a block that is applied n times are looked at n times, not
// the whole model.
void ForwardListener::check_parts(const int* tags, int count, bool begun) {
  const auto at = [](auto& all, int i) -> auto& { return all[static_cast<std::size_t>(i)]; };
  const int groups = static_cast<int>(p_.binding().groups().size());
  checks_made_.resize(static_cast<std::size_t>(groups));
  checked_at_use_.resize(members_.size());
  const auto check = [&](int begin, int end) {
    p_.relay.keeping([&] {
      for (int group = begin; group < std::min(end, groups); ++group) checks_.cut_parameters(group);
    });
  };
  if (begun) {
    first_tags_.assign(tags, tags + count);
    for (int& checks : checks_made_) ++checks;
    check(0, groups);
  } else {
    for (const int group : groups_of(tags, count, members_)) {
      const bool again = std::any_of(tags, tags + count, [&](int tag) {
        return at(members_, tag).group == group &&
               (at(checked_at_use_, tag) == at(checks_made_, group) ||
                std::find(first_tags_.begin(), first_tags_.end(), tag) != first_tags_.end());
      });
      if (!again) continue;
      ++at(checks_made_, group);
      check(group, group + 2);
    }
  }
  for (const int* tag = tags; tag != tags + count; ++tag)
    at(checked_at_use_, *tag) = at(checks_made_, at(members_, *tag).group);
}

void ForwardListener::end_forward() const {
  if (p_.products) p_.products->end_forward();
  if (p_.activations && torch_hooks::saved_tensor_policy() == p_.activations)
    torch_hooks::set_saved_tensor_policy(nullptr);
}

void ForwardListener::show(int group) {
  if (group == shown_group_.exchange(group)) return;
  const auto& name = p_.groups[static_cast<std::size_t>(group)].name;
  observe::status_page().set_unit(name);
  p_.trace.enter(name);
  count_bytes();
}

void ForwardListener::count_bytes() {
  if (!p_.trace.recording()) return;
  p_.trace.count(*p_.memory->ledger, p_.prefetcher().unsharded_bytes());
}

void ForwardListener::before_use(const int* tags, int count, const char* op) {
  auto& progress = p_.progress;
  if (!progress.failed.empty() || !progress.half_loaded.empty()) checks_.require_usable("forward");
  if (p_.program->update_pending()) checks_.require_current(op);
  const bool begun = begin_forward();
  observe::status_page().note_use();
  if (p_.products) {
    torch_hooks::set_segment_listener(p_.products);  // another Engine may have run since
    if (!progress.in_backward) check_parts(tags, count, begun);
  }
  if (!progress.in_backward && torch_hooks::saved_tensor_policy() != p_.activations)
    torch_hooks::set_saved_tensor_policy(p_.activations);
  show(members_[static_cast<std::size_t>(tags[0])].group);
  if (!p_.plan.run.sharding.params) return;
  const auto groups = groups_of(tags, count, members_);
  const bool training = progress.in_backward || at::GradMode::is_enabled();
  const auto use = [&] { p_.program->begin_use({groups.data(), groups.size()}, training); };
  if (p_.job.comm->size() == 1) {  // no other rank waits, so another batch may be tried
    const torch_hooks::NormalMode normal;
    use();
  } else {
    p_.relay.reporting(use);
  }
}

void ForwardListener::after_use(const int* tags, int count) noexcept {
  if (!p_.plan.run.sharding.params) return;
  const auto groups = groups_of(tags, count, members_);
  p_.program->end_use({groups.data(), groups.size()});
}

bool ForwardListener::before_write(int tag, const char* op) {
  const auto& member = members_[static_cast<std::size_t>(tag)];
  if (p_.progress.scopes.may_write(member.group)) return true;
  const auto& group = p_.binding().group(member.group);
  // A target network that follows the trained one: nothing else has its values.
  if (!group.facts.trainable && !p_.plan.run.sharding.params) {
    p_.progress.release_saves_here();
    return true;
  }
  return p_.relay.keeping([&]() -> bool {
    throw ConfigError(p_.where("forward") + op + " writes parameter " +
                      group.members[static_cast<std::size_t>(member.index)].name + " (group " + group.facts.name +
                      ") in place; the write would be lost. Hint: " +
                      (std::string_view(op) == "aten::embedding_renorm_"
                           ? "leave out max_norm of the embedding."
                           : "write inside a scope of engine.gathered_parameters(true)."));
  });
}

std::string ForwardListener::on_refused_dtype(int tag, const char* op, const at::Tensor& other) {
  const auto& member = members_[static_cast<std::size_t>(tag)];
  const auto& parameter = p_.binding().group(member.group).members[static_cast<std::size_t>(member.index)];
  const auto dtype = parameter.tensor.scalar_type();
  if (other.scalar_type() == dtype) return "";
  const auto kept = p_.job.settings.precision == config::Precision::Fp32
                        ? "."
                        : "; libzero.keep_fp32 names the parameters that stay fp32.";
  const auto reads =
      base::join(p_.where("forward"), op, " reads parameter ", parameter.name, " of ", c10::toString(dtype), " and ");
  for (const auto& buffer : p_.job.model->named_buffers()) {
    if (!buffer.value().defined() || !buffer.value().is_same(other)) continue;
    return base::join(reads, "buffer ", buffer.key(), " of ", c10::toString(other.scalar_type()),
                      ". Hint: data_types.buffer_dtype is the dtype of the model's buffers", kept);
  }
  return base::join(reads, "a tensor of ", c10::toString(other.scalar_type()), ". Hint: cast the tensor", kept);
}

}  // namespace zero::engine
