// See backward.h.
#include "engine/backward.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "base/check.h"
#include "base/gathered_values.h"
#include "base/log.h"
#include "engine/backward_scope.h"
#include "engine/rank_agreement.h"
#include "observe/status_page.h"
#include "torch_hooks/allocation_observer.h"
#include "torch_hooks/saved_tensors.h"

namespace zero::engine {

void Backward::run(const at::Tensor& loss, const BackwardOptions& options) {
  choose_counting(/*by_program=*/false);
  p_.relay.keeping([&] { checks_.before_backward(loss, options); });
  const torch_hooks::NormalMode normal;
  guarded([&] { run_pass(loss, options); });
}

void Backward::begin_program_pass(const BackwardOptions& options) {
  choose_counting(/*by_program=*/true);
  p_.relay.keeping([&] { checks_.before_pass(options); });
  const torch_hooks::NormalMode normal;
  guarded([&] { begin_pass(at::Tensor(), options); });
  p_.progress.in_backward = true;
}

void Backward::end_program_pass(const BackwardOptions& options) {
  const torch_hooks::NormalMode normal;
  p_.progress.in_backward = false;
  guarded([&] { end_pass(options, /*check=*/true); });
}

void Backward::fail_program_pass() noexcept {
  p_.progress.in_backward = false;
  try {
    p_.program->interrupt_backward();
  } catch (const std::exception&) {  // the micro-batch is given up anyway
  }
  give_up("a backward() of the program ended with an error");
}

template <class Fn>
void Backward::guarded(Fn&& fn) {
  try {
    fn();
  } catch (const CommError&) {
    p_.relay.reporting([] { throw; });
  } catch (const std::exception& e) {
    give_up(e.what());
    throw;
  } catch (...) {
    give_up("an exception that is no std::exception");
    throw;
  }
}

void Backward::run_pass(const at::Tensor& loss, const BackwardOptions& options) {
  begin_pass(loss, options);
  if (loss.defined()) run_autograd(loss, options, weight_of(options));
  end_pass(options, /*check=*/loss.defined());
}

void Backward::begin_pass(const at::Tensor& loss, const BackwardOptions& options) {
  auto& page = observe::status_page();
  p_.progress.in_forward = false;
  listener_.end_forward();
  p_.trace.begin_phase(observe::TraceKind::Backward);
  listener_.begin_phase();
  page.set_phase(observe::StatusPhase::Backward);
  const bool first = p_.accumulated().passes == 0;
  choose_active(first);
  if (first) {
    losses_.clear();
    losses_are_finite_ = true;
  }
  if (loss.is_cuda())
    losses_.push_back(loss.detach());
  else if (loss.defined())
    losses_are_finite_ &= std::isfinite(loss.item<double>());
  const bool retains = options.retain_graph || options.create_graph;
  keeps_graph_ = options.create_graph;
  p_.program->begin_backward({.retains = retains, .keeps_graph = keeps_graph_, .recoverable = options.recoverable});
  for (const auto& group : p_.binding().groups()) group->gradients.begin_pass(keeps_graph_);
  compare_losses(loss);
  warn_of_unused_sequence();
}

void Backward::end_pass(const BackwardOptions& options, bool check) {
  auto& page = observe::status_page();
  const bool retains = options.retain_graph || options.create_graph;
  const bool within = p_.accumulated().open;  // an earlier pass of the micro-batch
  if (p_.activations && !retains) p_.activations->end_backward();
  page.set_phase(observe::StatusPhase::Reduce);
  if (!keeps_graph_) take_waiting();
  const auto missing = p_.program->fill_missing();
  if (!keeps_graph_)
    note_unused(missing, within, check && !retains);
  else if (!within)
    unused_ = reduced_names();  // a later pass takes the gradients, and sees which are there
  p_.program->end_backward();
  for (const auto& group : p_.binding().groups()) group->gradients.end_pass();
  p_.trace.end_phase();
  listener_.count_bytes();
  if (!retains) p_.progress.backward_since_step = true;
  page.set_phase(observe::StatusPhase::Idle);
}

bool Backward::losses_are_finite() const {
  return losses_are_finite_ && std::all_of(losses_.begin(), losses_.end(),
                                           [](const at::Tensor& loss) { return std::isfinite(loss.item<double>()); });
}

// Tensor-parallel ranks compute one loss. Another seed or sampler on one of them would train a mixture.
void Backward::compare_losses(const at::Tensor& loss) {
  if (!p_.products || !loss.defined()) return;
  if (std::exchange(compared_losses_, true) && !p_.job.settings.zero.sanity_checks) return;
  char value[40];
  std::snprintf(value, sizeof value, "%.17g", loss.item<double>());
  const auto all = p_.ranks.tensor->all_gather_bytes(value);
  for (std::size_t j = 1; j < all.size(); ++j)
    if (all[j] != all[0])
      throw ConfigError(p_.where("backward") +
                        base::join("the ranks of a tensor-parallel group got different losses: ", all[0],
                                   " on tp 0 and ", all[j], " on tp ", j,
                                   ". Hint: all its ranks read the same samples, by mesh.rank(\"dp\") of "
                                   "mesh.size(\"dp\"), and draw the same random numbers outside of split layers."));
}

// Without an exchange each rank's attention would see its own stretch of the tokens only.
void Backward::warn_of_unused_sequence() {
  if (std::exchange(looked_for_sequence_, true) || p_.ranks.mesh->size("sp") == 1 || p_.job.comm->rank() != 0) return;
  if (!p_.ranks.mesh->exchanged_sequence())
    base::log(LogLevel::Warning,
              base::join("sequence_parallel_size is ", p_.ranks.mesh->size("sp"),
                         ", but the model exchanged no tokens in its first forward. Hint: attention calls "
                         "zero::attention_over_heads(engine.mesh(), q, k, v, ...) (zero/sp.h)."));
}

// What a loss is multiplied by so that the reduction over ranks gives the mean over the tokens of all ranks.
double Backward::weight_of(const BackwardOptions& options) const {
  if (!options.tokens) return 1;
  std::int64_t all = 0;
  for (const auto tokens : base::all_gather_values(*p_.ranks.shard, *options.tokens)) all += tokens;
  const double ranks = p_.job.settings.reduce_op == config::ReduceOp::Mean ? p_.ranks.shard->size() : 1;
  return all == 0 ? 0 : ranks / static_cast<double>(all);
}

void Backward::run_autograd(const at::Tensor& loss, const BackwardOptions& options, double weight) {
  const double factor = weight * p_.scaler->scale() / static_cast<double>(p_.accumulation());
  const auto scaled = factor == 1.0 ? loss : loss.to(at::kFloat) * factor;
  const BackwardScope scope(!p_.plan.device.is_cpu());
  p_.progress.in_backward = true;
  if (p_.products) torch_hooks::set_segment_listener(p_.products);
  try {
    torch::autograd::backward({scaled}, {}, options.retain_graph || options.create_graph, options.create_graph);
  } catch (...) {
    p_.progress.in_backward = false;
    p_.program->interrupt_backward();
    throw;
  }
  p_.progress.in_backward = false;
}

// --- gradients --------------------------------------------------------------------------------

void Backward::on_gradient(int group, int member) {
  if (p_.binding().group(group).gradients.excluded(static_cast<std::size_t>(member))) return;
  if (p_.progress.in_backward) {
    if (keeps_graph_) return p_.program->note_gradient();
    return take(group, member);
  }
  auto& of = p_.binding().group(group);
  of.gradients.drop_foreign(static_cast<std::size_t>(member));
  if (BackwardScope::active()) return;  // another Engine's
  p_.relay.keeping([&] {
    throw ConfigError(
        p_.where("backward") + "a gradient of " + of.members[static_cast<std::size_t>(member)].name +
        " arrived outside Engine::backward. Hint: call engine.backward(loss) instead of loss.backward().");
  });
}

void Backward::take(int group, int member) {
  auto& binding = p_.binding();
  const auto& of = binding.group(group);
  const auto i = static_cast<std::size_t>(member);
  if (of.gradients.active(i) && of.members[i].tensor.grad().defined() && !p_.program->accepts_gradient(group, member))
    throw ConfigError(
        "[Engine::backward] a second gradient of " + of.members[i].name + " arrived after group " + of.facts.name +
        " was reduced. Hint: run one backward per Engine::backward; reentrant checkpointing is not supported.");
  const auto arrived = binding.take_gradient(group, member);
  if (!arrived) return p_.program->note_gradient();
  try {
    p_.program->gradient(group, member, arrived->view, arrived->peer_readable);
  } catch (...) {  // for example, a refused allocation
    if (!p_.program->groups()[static_cast<std::size_t>(group)]->grads->taken(member))
      binding.drop_arrived(arrived->view);
    throw;
  }
}

// Takes the gradients that an earlier pass left in .grad with their graph.
void Backward::take_waiting() {
  const auto& groups = p_.program->groups();
  for (int g = 0; g < static_cast<int>(groups.size()); ++g) {
    if (!groups[static_cast<std::size_t>(g)]->facts.trainable) continue;
    const auto& group = p_.binding().group(g);
    for (int i = 0; i < static_cast<int>(group.members.size()); ++i) {
      const auto& grad = group.members[static_cast<std::size_t>(i)].tensor.grad();
      if (groups[static_cast<std::size_t>(g)]->grads->taken(i) || !grad.defined() ||
          grad.is_same(group.gradients.kept(static_cast<std::size_t>(i))))
        continue;
      take(g, i);
    }
  }
}

std::vector<std::string> Backward::reduced_names() const {
  std::vector<std::string> names;
  for (const auto g : step::reduce_order(p_.groups))
    for (const auto& member : p_.binding().group(static_cast<int>(g)).members) names.push_back(member.name);
  return names;
}

// Records parameters without a gradient in any pass of the micro-batch. within: it had earlier passes.
void Backward::note_unused(const std::vector<std::pair<int, int>>& missing, bool within, bool check) {
  std::vector<std::string> names;
  for (const auto& [group, member] : missing) {
    const auto& parameter = p_.binding().group(group).members[static_cast<std::size_t>(member)];
    if (!parameter.tensor.requires_grad()) continue;  // frozen since the step's first micro-batch
    const auto& name = parameter.name;
    if (!within || std::find(unused_.begin(), unused_.end(), name) != unused_.end()) names.push_back(name);
  }
  unused_ = std::move(names);
  if (check && !unused_.empty() && !p_.job.settings.zero.ignore_unused_parameters)
    throw ConfigError(p_.where("backward") + "no gradient for parameter " + unused_.front() +
                      (unused_.size() > 1 ? base::join(" and ", unused_.size() - 1, " more") : "") +
                      ", and zero_optimization.ignore_unused_parameters is false");
}

// --- what is trained --------------------------------------------------------------------------

// Groups that were frozen at construction and now have a parameter that requires grad, one line each; also those of the
// experts of other ranks, so that all ranks notice.
std::string Backward::unfrozen_units() const {
  std::string names;
  for (const auto& group : p_.binding().groups()) {
    if (group->facts.trainable) continue;
    if (group->gradients.activity_changed(/*first=*/true)) names += group->facts.name + "\n";
    const auto is_here = [&](const ModelParameter& member, const ModelParameter& remote) {
      return member.expert && member.name == remote.expert->at(member.expert->place(), remote.name);
    };
    if (std::any_of(p_.plan.remote.begin(), p_.plan.remote.end(), [&](const ModelParameter& remote) {
          return remote.tensor.requires_grad() &&
                 std::any_of(group->members.begin(), group->members.end(),
                             [&](const ModelParameter& member) { return is_here(member, remote); });
        }))
      names += group->facts.name + " of other ranks\n";
  }
  return names;
}

void Backward::compare_unfrozen(const char* call) {
  if (const auto text =
          disagreement(*p_.job.comm, p_.where(call) + "the units with unfrozen parameters", unfrozen_units());
      !text.empty())
    throw ConfigError(text + ". Hint: call requires_grad_() in the same way on every rank.");
  p_.progress.release_saves(call);  // what is unfrozen gets a master
}

void Backward::admit_unfrozen() {
  if (unfrozen_units().empty()) return;
  const at::NoGradGuard no_grad;
  const torch_hooks::AllocationObserver::Pause pause;
  for (int g = 0; g < static_cast<int>(p_.groups.size()); ++g) {
    auto& group = p_.binding().group(g);
    if (group.facts.trainable || !group.gradients.activity_changed(/*first=*/true)) continue;
    auto& known = p_.groups[static_cast<std::size_t>(g)];
    const auto trained = p_.plan.tiers->trained_facts(static_cast<std::size_t>(g));
    if (std::any_of(trained.segments.begin(), trained.segments.end(),
                    [](const step::Segment& segment) { return segment.tier == step::Tier::File; })) {
      const auto unfrozen = std::find_if(group.members.begin(), group.members.end(),
                                         [](const ModelParameter& member) { return member.tensor.requires_grad(); });
      throw ConfigError("[Engine] requires_grad of parameter " + unfrozen->name +
                        " became true, but the Engine took it frozen, and the file of optimizer states was made "
                        "without it. Hint: let it require grad when the Engine is made, and freeze it afterwards: "
                        "requires_grad_(false) between steps.");
    }
    p_.program->admit(g, trained);
    known = trained;
    group.gradients.set_trainable(true);
  }
}

// At the start of a pass: selects the parameters that the step trains. first: see MemberGradients::choose_active().
void Backward::choose_active(bool first) {
  const auto& groups = p_.binding().groups();
  const auto changed = [first](const auto& group) { return group->gradients.activity_changed(first); };
  const bool unfrozen = !unfrozen_units().empty();
  if (std::none_of(groups.begin(), groups.end(), changed) && !unfrozen) return;
  if (unfrozen) compare_unfrozen("backward");
  admit_unfrozen();
  p_.program->join_update();  // the pending update uses the previous selection
  for (int g = 0; g < static_cast<int>(groups.size()); ++g) {
    auto& gradients = groups[static_cast<std::size_t>(g)]->gradients;
    if (!gradients.activity_changed(first)) continue;
    gradients.choose_active(first);
    for (int i = 0; i < p_.groups[static_cast<std::size_t>(g)].num_members(); ++i)
      p_.program->set_active(g, i, gradients.active(static_cast<std::size_t>(i)));
    p_.backend->update.cut_runs(g);
  }
}

// --- a pass that failed -----------------------------------------------------------------------

void Backward::give_up(const std::string& error) noexcept {
  try {
    if (p_.job.comm->size() == 1) {
      drop_micro_batch();
    } else {
      p_.progress.failed = described(error);
      p_.relay.keep(p_.where("backward") + p_.progress.failed);
    }
  } catch (const std::exception& e) {  // the cleanup failed as well
    p_.relay.report(e.what());
  }
}

void Backward::drop_micro_batch() {
  const auto kept = p_.program->discard_micro_batch();
  if (kept != step::KeptGrads::None)
    for (const auto& group : p_.binding().groups()) group->gradients.end_pass();
  p_.progress.in_forward = false;
  listener_.end_forward();
  if (p_.activations) p_.activations->end_backward();
  p_.trace.end_phase();
  observe::status_page().set_phase(observe::StatusPhase::Idle);
}

void Backward::discard_gradients() {
  p_.relay.keeping([&] {
    checks_.require_usable("discard_gradients");
    if (p_.progress.scopes.any())
      throw ConfigError(p_.where("discard_gradients") + "called inside a scope of gathered_parameters");
    p_.program->discard_gradients();
    p_.progress.backward_since_step = false;
  });
}

void Backward::choose_counting(bool by_program) {
  const auto& accumulated = p_.accumulated();
  if (!p_.progress.adds_up || accumulated.micro_batches > 0 || accumulated.open) return;
  p_.program->count_micro_batches(!by_program);
}

std::int64_t Backward::discard_micro_batch() {
  p_.relay.keeping([&] {
    if (p_.progress.scopes.any())
      throw ConfigError(p_.where("discard_micro_batch") + "called inside a scope of gathered_parameters");
  });
  return p_.relay.reporting([&] {
    p_.progress.failed.clear();
    drop_micro_batch();
    const auto left = p_.accumulated().micro_batches;
    if (p_.job.comm->size() == 1) return left;
    const auto all = base::all_gather_values(*p_.job.comm, left);
    for (std::size_t r = 0; r < all.size(); ++r)
      if (all[r] != all[0])
        throw ConfigError(p_.where("discard_micro_batch") +
                          base::join("keeps ", all[0], " micro-batches on rank 0 and ", all[r], " on rank ", r,
                                     ": the ranks did not fail at the same place"));
    p_.relay.forget();
    return left;
  });
}

}  // namespace zero::engine
