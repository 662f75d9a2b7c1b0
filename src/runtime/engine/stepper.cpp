// See stepper.h.
#include "engine/stepper.h"

#include <ATen/ATen.h>
#include <xxhash.h>

#include <limits>

#include "base/check.h"
#include "base/gathered_values.h"
#include "engine/parameter_access.h"
#include "engine/replicas.h"
#include "observe/status_page.h"

namespace zero::engine {

Stepper::Stepper(Parts& parts, const Checks& checks, Backward& backward, ForwardListener& listener)
    : p_(parts), checks_(checks), backward_(backward), listener_(listener) {
  p_.backend->comm.exchange_norms = [this](double mine) { return exchange_norms(mine); };
  if (!p_.plan.run.updates_together || p_.ranks.axes.size() > 1) return;  // experts are compared before the update
  p_.backend->tensors.combine_norms({p_.job.comm->size(),
                                     [this](const at::Tensor& out, const at::Tensor& in) {
                                       const observe::TraceSpan wait(p_.trace.trace(), observe::TraceKind::ExchangeWait,
                                                                     "norm");
                                       p_.job.comm->all_gather(out, in)->wait();
                                     },
                                     [this] { return p_.job.comm->size() == 1 ? 0 : hash_of_choices(); },
                                     [this](const auto& parts) {
                                       check_choices(parts);
                                       p_.relay.forget();  // all ranks have communicated
                                     }});
}

namespace {

// Only where the step acts, because only there it is collective.
void poll_background_save(Parts& p) {
  const auto& accumulated = p.accumulated();
  const auto micro_batches = accumulated.micro_batches + (accumulated.open ? 1 : 0);
  const bool acts = p.program->counts_micro_batches() ? micro_batches == p.plan.batch.accumulation : micro_batches > 0;
  if (!p.progress.background || !acts) return;
  bool over = true;
  try {
    over = p.progress.background->at_boundary();
  } catch (const CommError& e) {
    p.progress.background.reset();
    p.relay.report(e.what());
    throw;
  } catch (...) {
    p.progress.background.reset();
    throw;
  }
  if (over) p.progress.background.reset();
}

}  // namespace

bool Stepper::at_boundary() const {
  const auto& accumulated = p_.accumulated();
  if (!p_.program->counts_micro_batches()) return accumulated.micro_batches > 0 || accumulated.open;
  return accumulated.micro_batches + (p_.progress.backward_since_step ? 0 : 1) == p_.plan.batch.accumulation;
}

StepResult Stepper::step() {
  p_.relay.keeping([&] { checks_.before_step(); });
  poll_background_save(p_);
  return p_.relay.reporting([&] {
    if (p_.accumulated().open) backward_.close_micro_batch();
    auto& progress = p_.progress;
    StepResult result;
    result.lr = p_.optimizer->lr(0);
    result.loss_scale = p_.scaler->scale();
    result.global_step = p_.program->steps();
    result.grad_norm = progress.last_norm;
    progress.backward_since_step = false;
    listener_.end_forward();
    if (!p_.program->at_boundary()) return result;
    const step::Prefetcher::Alone alone(p_.prefetcher(), p_.where("step"));
    auto& page = observe::status_page();
    page.set_step(p_.program->steps());
    page.set_phase(observe::StatusPhase::Step);
    p_.trace.begin_phase(observe::TraceKind::Act);
    progress.global_samples += p_.accumulated().micro_batches * p_.plan.batch.micro * p_.ranks.mesh->size("dp");
    compare_replicas_at_times(p_);  // before the update, which overwrites most of them
    const auto outcome = p_.program->step();
    result.grad_norm = progress.last_norm = outcome.norm;
    result.overflow = outcome.overflow;
    result.updated = outcome.updated;
    progress.skipped_steps += outcome.overflow;
    if (outcome.give_up) fail_numerically();
    result.loss_scale = p_.scaler->scale();
    result.global_step = p_.program->steps();
    page.set_step(p_.program->steps());
    page.set_phase(observe::StatusPhase::Idle);
    listener_.count_bytes();
    p_.trace.end_step(p_.program->steps());
    return result;
  });
}

double Stepper::grad_norm(const char* call) {
  p_.relay.keeping([&] {
    checks_.before_step();
    if (!p_.program->at_boundary() && !p_.accumulated().open)
      throw ConfigError(p_.where(call) + base::join("called after ", p_.accumulated().micro_batches, " of ",
                                                    p_.plan.batch.accumulation,
                                                    " micro-batches, expected between the last backward() and step()"));
  });
  return p_.relay.reporting([&] {
    if (p_.accumulated().open) backward_.close_micro_batch();
    return p_.program->norm();
  });
}

double Stepper::clip_grad_norm(double max_norm) {
  constexpr const char* kCall = "clip_grad_norm";
  p_.relay.keeping([&] {
    if (!(max_norm >= 0)) throw ConfigError(p_.where(kCall) + base::join("got ", max_norm, ", expected 0 or more"));
  });
  const double norm = grad_norm(kCall);
  const double before = p_.accumulated().clip.value_or(std::numeric_limits<double>::infinity());
  // A maximum of 0 would be no clipping: the smallest number sets gradients to zero.
  p_.program->clip(std::min(before, std::max(max_norm, std::numeric_limits<double>::min())));
  return std::min(norm, before);
}

// --- the norm ---------------------------------------------------------------------------------

namespace {

// Which parameters of an axis are trained, in order.
std::string active_on(const ModelBinding& binding, int axis) {
  std::string text;
  for (const auto& group : binding.groups())
    for (std::size_t i = 0; group->facts.axis == axis && i < group->members.size(); ++i)
      text += group->gradients.active(i) ? '1' : '0';
  return text;
}

// [collective] Ranks that have the same experts train the same ones.
void compare_experts(const Parts& parts) {
  for (std::size_t axis = 1; axis < parts.ranks.axes.size(); ++axis)
    for (const auto mine = active_on(parts.binding(), static_cast<int>(axis));
         const auto& theirs : parts.ranks.axes[axis]->all_gather_bytes(mine))
      if (theirs != mine)
        throw ConfigError(parts.where("step") +
                          "got other frozen experts than another rank that has the same ones. Hint: call "
                          "requires_grad_() in the same way on every rank.");
}

}  // namespace

// A hash of settings that must be equal on all ranks, besides the configuration: frozen parameters and learning rates.
std::uint64_t Stepper::hash_of_choices() const {
  auto text = active_on(p_.binding(), 0);
  const auto& rates = p_.optimizer->set_rates();
  text.append(reinterpret_cast<const char*>(rates.data()), rates.size() * sizeof(double));
  text += p_.optimizer->set_numbers();
  if (p_.job.rule) text += base::join(" ", p_.job.rule->choices());
  return XXH3_64bits(text.data(), text.size());
}

std::vector<double> Stepper::exchange_norms(double squares) {
  DeviceNorm::Part mine{squares, 0};
  std::vector<double> norms;
  if (p_.job.comm->size() == 1) {
    norms.push_back(squares);
  } else {
    mine.tag = hash_of_choices();
    compare_experts(p_);
    const observe::TraceSpan wait(p_.trace.trace(), observe::TraceKind::ExchangeWait, "norm");
    const auto all = base::all_gather_values(*p_.job.comm, mine);
    for (const auto& part : all) norms.push_back(part.sum);
    check_choices(all);
  }
  p_.relay.forget();  // all ranks have communicated
  return norms;
}

void Stepper::check_choices(const std::vector<DeviceNorm::Part>& parts) const {
  std::string different;
  for (std::size_t rank = 1; rank < parts.size(); ++rank)
    if (parts[rank].tag != parts[0].tag) different += base::join(different.empty() ? "" : ", ", rank);
  if (!different.empty())
    throw ConfigError(p_.where("step") + "got other frozen parameters, or other rates of set_lr()" +
                      (p_.job.rule ? ", or other numbers of the program's optimizer" : "") +
                      ", on rank 0 than on rank " + different +
                      ". Hint: call requires_grad_() and set_lr() in the same way on every rank.");
}

std::string Stepper::find_non_finite() const {
  for (const auto g : step::reduce_order(p_.groups)) {
    const auto& members = p_.binding().group(static_cast<int>(g)).members;
    for (std::size_t i = 0; i < members.size(); ++i)
      if (!at::isfinite(reduced_gradient(p_, static_cast<int>(g), i).second).all().item<bool>()) return members[i].name;
  }
  return "";
}

// After too many consecutive steps with non-finite gradients: every rank throws, naming the parameter, whose gradient
// is a sum over ranks, and the ranks whose own loss is not finite.
void Stepper::fail_numerically() {
  compare_replicas(p_);  // what one rank's parameters have caused is not a matter of gradients
  std::string culprits, losses;
  auto names = p_.job.comm->all_gather_bytes(find_non_finite() + (backward_.losses_are_finite() ? "" : "\n"));
  for (std::size_t r = 0; r < names.size(); ++r) {
    if (names[r].ends_with('\n')) {
      names[r].pop_back();
      losses += base::join(losses.empty() ? "; the loss of the last step was not finite on rank " : ", ", r);
    }
    if (!names[r].empty())
      culprits +=
          base::join(culprits.empty() ? "" : ", ", p_.job.settings.zero.quantized_gradients ? "or next to " : "",
                     names[r], " (in the shard of rank ", r, ")");
  }
  const auto& scaler = *p_.scaler;
  // Every overflow before these has halved the scale.
  const auto at = scaler.dynamic() ? base::join(" at the minimum loss scale, ", scaler.scale()) : std::string();
  throw InternalError(
      p_.where("step") + base::join(scaler.state().floor, " steps in a row had non-finite gradients", at, ", first in ",
                                    culprits, losses,
                                    ". Hint: lower the learning rate, or look at the data; libzero.max_skipped_steps "
                                    "sets the limit."),
      ExitCode::kNumerical);
}

// --- between steps ----------------------------------------------------------------------------

double Stepper::lr(int group) const {
  if (group < 0 || group >= p_.optimizer->num_parameter_groups())
    throw ConfigError(base::join("[Engine::lr] got parameter group ", group, ", expected 0 to ",
                                 p_.optimizer->num_parameter_groups() - 1));
  return p_.optimizer->lr(group);
}

void Stepper::set_lr(int group, double lr) {
  p_.relay.keeping([&] {
    p_.program->join_update();  // the pending update reads the learning rates
    p_.optimizer->set_lr(group, lr);
  });
}

void Stepper::set_number(int group, const std::string& name, double value) {
  p_.relay.keeping([&] {
    p_.program->join_update();
    p_.optimizer->set_number(group, name, value);
  });
}

void Stepper::flush() {
  p_.relay.keeping([&] {
    checks_.require_usable("flush");
    if (p_.program->update_pending()) checks_.require_boundary("flush");
  });
  p_.relay.reporting([&] {
    if (!p_.program->update_pending()) return p_.program->flush();
    const step::Prefetcher::Alone alone(p_.prefetcher(), p_.where("flush"));
    p_.program->flush();
  });
}

void Stepper::begin_replacing(const char* call) {
  p_.progress.release_saves(call);
  const step::Prefetcher::Alone alone(p_.prefetcher(), p_.where(call));
  p_.program->begin_replacing();
}

}  // namespace zero::engine
