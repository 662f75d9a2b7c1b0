// One training step: uses, gradients, reduction, update.
#include "engine/state.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/idle_memory.h"
#include "base/status_page.h"
#include "config/stage_rules.h"
#include "engine/model_checks.h"
#include "optim/clipping.h"

namespace zero::engine {
namespace {

// Of the parameters of one operator, each group once, in the order of their first use.
template <class Members>
c10::SmallVector<int, 8> groups_of(const int* tags, int count, const Members& members) {
  c10::SmallVector<int, 8> groups;
  for (int i = 0; i < count; ++i) {
    const int group = members[static_cast<std::size_t>(tags[i])].group;
    // Lists of parameters come unit by unit: the last one is the likely one.
    if (std::find(groups.rbegin(), groups.rend(), group) == groups.rend()) groups.push_back(group);
  }
  return groups;
}

}  // namespace

std::string State::where(const char* what) const {
  return base::join("[Engine::", what, "] (rank ", comm_->rank(), "/", comm_->size(), ", step ", global_steps_, ") ");
}

// --- interception -----------------------------------------------------------------------------

void State::begin_forward() {
  if (in_forward_ || in_backward_ || in_forward_.exchange(true)) return;
  trace_.begin_phase(base::TraceKind::Forward);
  shown_unit_ = -1;
  base::status_page().set_step(global_steps_, static_cast<int>(micro_step_));
  base::status_page().set_phase(base::StatusPhase::Forward);
}

// In a thread with several engines the one whose parameter was used last says how activations are kept.
void State::end_activations() const {
  if (activations_ && torchglue::keeping() == activations_) torchglue::set_keeping(nullptr);
}

void State::before_use(const int* tags, int count, const char*) {
  begin_forward();
  if (!in_backward_ && torchglue::keeping() != activations_) torchglue::set_keeping(activations_);
  if (const int unit = members_[static_cast<std::size_t>(tags[0])].group; unit != shown_unit_.exchange(unit)) {
    const auto& name = groups_[static_cast<std::size_t>(unit)]->name();
    base::status_page().set_unit(name);
    trace_.enter(name);
    count_bytes();
  }
  if (stage_ < 3) return;
  const auto groups = groups_of(tags, count, members_);
  const bool training = in_backward_ || at::GradMode::is_enabled();
  telling_peers([&] { prefetcher_->begin_use(groups.data(), static_cast<int>(groups.size()), training); });
}

void State::after_use(const int* tags, int count) noexcept {
  if (stage_ < 3) return;
  const auto groups = groups_of(tags, count, members_);
  prefetcher_->end_use(groups.data(), static_cast<int>(groups.size()));
}

void State::before_write(int tag, const char* op) {
  if (modifying_scopes_ > 0) return;
  const auto& member = members_[static_cast<std::size_t>(tag)];
  const auto& group = *groups_[static_cast<std::size_t>(member.group)];
  telling_peers([&] {
    throw ConfigError(where("forward") + op + " writes parameter " + group.members()[member.index].name + " (group " +
                      group.name() +
                      ") in place; the write would be lost. Hint: write inside a scope of "
                      "engine.gathered_parameters(true).");
  });
}

void State::check_parameters(const char* what) const {
  for (const auto& member : members_) {
    const auto& group = *groups_[static_cast<std::size_t>(member.group)];
    const auto& parameter = group.members()[member.index];
    if (!torchglue::is_intercepted(parameter.tensor))
      throw ConfigError(
          where(what) + "parameter " + parameter.name +
          " was replaced behind the Engine (module.to(...), set_data, torch::load). Hint: move, cast and load the "
          "module before the Engine takes it, and let the recipe choose the dtype; in a scope of "
          "gathered_parameters(true) write with copy_.");
    if (parameter.tensor.requires_grad() != group.trainable())
      throw ConfigError(where(what) + "requires_grad of parameter " + parameter.name + " was changed to " +
                        (group.trainable() ? "false" : "true") +
                        " after the Engine took it. Hint: freeze before making the Engine.");
  }
  check_hooks(groups_, where(what));
}

// --- backward ---------------------------------------------------------------------------------

void State::backward(const at::Tensor& loss) {
  telling_peers([&] {
    check_parameters("backward");
    if (gathered_scopes_ > 0) throw ConfigError(where("backward") + "called inside a scope of gathered_parameters");
    if (!loss.defined() || loss.numel() != 1 || !loss.requires_grad())
      throw ConfigError(where("backward") +
                        (!loss.defined() ? "got no tensor"
                                         : base::join("got a loss with ", loss.numel(), " elements, requires_grad ",
                                                      loss.requires_grad())) +
                        ", expected a scalar that requires grad");
    if (settings_.managed_gradient_accumulation && micro_step_ == accumulation_)
      throw ConfigError(where("backward") + "called " + std::to_string(accumulation_ + 1) +
                        " times without step(). Hint: call step() after every backward(); it acts at the boundary.");
    auto& page = base::status_page();
    in_forward_ = false;
    end_activations();
    trace_.begin_phase(base::TraceKind::Backward);
    shown_unit_ = -1;
    page.set_phase(base::StatusPhase::Backward);
    const bool first = micro_step_ == 0;
    const bool boundary = settings_.managed_gradient_accumulation && micro_step_ + 1 == accumulation_;
    for (const auto& group : groups_) group->begin_micro_step(first, boundary);
    reduce_next_ = 0;
    in_flight_.clear();
    prefetcher_->begin_backward();
    reads_ahead_ = boundary && !delays() && !pending_;
    const double factor = scaler_->scale() / static_cast<double>(accumulation_);
    const auto scaled = factor == 1.0 ? loss : loss.to(at::kFloat) * factor;
    in_backward_ = true;
    if (blocks_) blocks_->open(true);
    const auto close = [&] {
      in_backward_ = false;
      if (blocks_) blocks_->open(false);
    };
    try {
      torch::autograd::backward({scaled}, {});
    } catch (...) {
      close();
      throw;
    }
    close();
    if (activations_) activations_->end_backward();
    page.set_phase(base::StatusPhase::Reduce);
    std::vector<std::string> unused;
    for (auto* group : reduce_order_)
      for (auto& name : group->flush_missing()) unused.push_back(std::move(name));
    if (!unused.empty() && !settings_.zero.ignore_unused_parameters)
      throw ConfigError(where("backward") + "no gradient for parameter " + unused.front() +
                        (unused.size() > 1 ? base::join(" and ", unused.size() - 1, " more") : "") +
                        ", and zero_optimization.ignore_unused_parameters is false");
    reduce_ready_groups();
    finish_reductions(0);
    prefetcher_->end_pass();
    trace_.end_phase();
    count_bytes();
    ++micro_step_;
    backward_since_step_ = true;
    page.set_phase(base::StatusPhase::Idle);
  });
}

void State::on_gradient(int group, std::size_t member) {
  if (!in_backward_)
    telling_peers([&] {
      throw ConfigError(
          where("backward") + "a gradient of " + groups_[static_cast<std::size_t>(group)]->members()[member].name +
          " arrived outside Engine::backward. Hint: call engine.backward(loss) instead of loss.backward().");
    });
  if (groups_[static_cast<std::size_t>(group)]->take_gradient(member)) reduce_ready_groups();
}

// Reductions begin in one fixed order on all ranks, whatever the order in which gradients arrive,
// so that a parameter unused on one rank only cannot mix up the collectives.
void State::reduce_ready_groups() {
  const bool overlap = settings_.zero.overlap_comm.value_or(stage_ == 3 || blocks_ != nullptr);
  while (reduce_next_ < reduce_order_.size() && reduce_order_[reduce_next_]->all_taken()) {
    auto* group = reduce_order_[reduce_next_++];
    // What is reduced where it lies costs no memory while it waits.
    finish_reductions(config::reductions_beside(stage_, blocks_ != nullptr, overlap, in_flight_.size()));
    group->begin_reduce();
    in_flight_.push_back(group);
    if (reads_ahead_) update_->read_ahead(reduce_next_, reduce_order_.size());
  }
}

void State::finish_reductions(std::size_t most_in_flight) {
  // Finishing early depends on the peers' pace, so it is only for reductions that end without another collective.
  while (in_flight_.size() > most_in_flight ||
         (blocks_ != nullptr && !in_flight_.empty() && in_flight_.front()->reduced())) {
    in_flight_.front()->finish_reduce();
    in_flight_.erase(in_flight_.begin());
  }
}

// --- step -------------------------------------------------------------------------------------

bool State::at_boundary() const {
  if (!settings_.managed_gradient_accumulation) return micro_step_ > 0;
  return micro_step_ + (backward_since_step_ ? 0 : 1) == accumulation_;
}

void State::require_boundary(const char* what) const {
  if (micro_step_ != 0)
    throw ConfigError(where(what) + base::join("called after ", micro_step_, " of ", accumulation_,
                                               " micro-batches. Hint: call it after step() has acted."));
}

double State::norm_and_overflow(bool* overflow) {
  double mine = 0;
  if (sums_) sums_->fetch();
  for (const auto* group : reduce_order_) mine += group->sum_of_squares();
  double total = mine;
  if (comm_->size() > 1) {
    // Summed in rank order on every rank: the same bits everywhere and at every stage.
    total = 0;
    base::TraceSpan wait(trace_.trace(), base::TraceKind::ExchangeWait, "norm");
    for (const auto& text : comm_->exchange({reinterpret_cast<const char*>(&mine), sizeof mine})) {
      double part = 0;
      std::memcpy(&part, text.data(), sizeof part);
      total += part;
    }
  }
  const bool checked = settings_.precision != config::Precision::Bf16 || settings_.check_grad_overflow;
  *overflow = checked && !std::isfinite(total);
  const double norm = std::sqrt(total) * static_cast<double>(postmultiply_) / scaler_->scale();
  return std::isfinite(norm) ? norm : -1;
}

StepResult State::step() {
  return telling_peers([&] {
    check_parameters("step");
    check_no_new_parameters(*model_, where("step"));
    if (gathered_scopes_ > 0) throw ConfigError(where("step") + "called inside a scope of gathered_parameters");
    StepResult result;
    result.lr = optimizer_->lr(0);
    result.loss_scale = scaler_->scale();
    result.global_step = global_steps_;
    result.grad_norm = last_norm_;
    backward_since_step_ = false;
    end_activations();
    const bool act = settings_.managed_gradient_accumulation ? micro_step_ == accumulation_ : micro_step_ > 0;
    if (!act) return result;
    const memory::Prefetcher::Alone alone(*prefetcher_, where("step"));
    auto& page = base::status_page();
    page.set_step(global_steps_);
    page.set_phase(base::StatusPhase::Step);
    trace_.begin_phase(base::TraceKind::Act);
    prefetcher_->end_pass();  // an evaluation since may have left groups gathered
    if (!settings_.managed_gradient_accumulation)
      for (auto* group : reduce_order_) group->close_accumulation();

    bool overflow = false;
    result.grad_norm = last_norm_ = norm_and_overflow(&overflow);
    result.overflow = overflow;
    const double scale = scaler_->scale();
    const bool give_up = scaler_->update(overflow);
    const bool late = delays();
    ++global_steps_;
    micro_step_ = 0;
    result.updated = finish_update();
    if (overflow) {
      ++skipped_steps_;
      if (give_up) fail_numerically(scaler_->state().floor);
    } else {
      const float factor = optim::gradient_factor(scale, result.grad_norm, settings_.gradient_clipping, postmultiply_);
      apply(factor, late);
      result.updated |= !late;
    }
    for (const auto& group : groups_) group->drop_gradients();
    prefetcher_->fetch_first();
    result.loss_scale = scaler_->scale();
    result.global_step = global_steps_;
    page.set_step(global_steps_);
    page.set_phase(base::StatusPhase::Idle);
    count_bytes();
    trace_.end_step(global_steps_);
    return result;
  });
}

// Too many steps in a row without a finite gradient: every rank throws, naming rank and parameter.
void State::fail_numerically(std::int64_t in_a_row) {
  std::string mine;
  for (const auto* group : reduce_order_) {
    mine = group->find_non_finite();
    if (!mine.empty()) break;
  }
  std::string culprits;
  const auto names = comm_->exchange(mine);
  for (std::size_t r = 0; r < names.size(); ++r)
    if (!names[r].empty())
      culprits += base::join(culprits.empty() ? "" : ", ", settings_.zero.quantized_gradients ? "or beside " : "",
                             names[r], " (in the shard of rank ", r, ")");
  throw InternalError(
      where("step") + base::join(in_a_row, " steps in a row had non-finite gradients, first in ", culprits,
                                 ". Hint: lower the learning rate, or look at the data; libzero.max_skipped_steps "
                                 "sets the limit."),
      ExitCode::kNumerical);
}

void State::reset_peak_memory() {
  gather_pool_->trim();
  reduce_pool_->trim();
  if (blocks_) blocks_->trim();
  base::release_idle_memory();  // what is idle goes back to the kernel too, so that both count the same
  ledger_->reset_peak();
  reset_allocator_peak(device_);
}

MemoryReport State::memory() const {
  auto report = ledger_->report();
  report.allocator = allocator_report(device_);
  return report;
}

}  // namespace zero::engine
