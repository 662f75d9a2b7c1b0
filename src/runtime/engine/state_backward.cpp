// Backward: passes of micro-batches, the gradients they bring, reductions in one order, and what is left of a pass that
// failed.
//
// [Note: passes] A micro-batch is one backward() or, with retain_graph, several: each is a pass. What passes bring adds
// up like micro-batches do: at stages 0 and 1 on each rank, reduced once, at 2 and 3 reduced pass by pass. Gradients of
// a pass with create_graph stay in .grad until a later pass takes them.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "engine/backward_scope.h"
#include "engine/rank_agreement.h"
#include "engine/state.h"
#include "observe/status_page.h"
#include "step/stage_rules.h"

namespace zero::engine {

void State::check_backward(const at::Tensor& loss, const BackwardOptions& options) {
  require_usable("backward");
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
  if (options.create_graph && (accumulation_ != 1 || micro_step_ != 0 || scaler_->scale() != 1))
    throw ConfigError(where("backward") +
                      base::join("got create_graph with ", accumulation_, " micro-batches a step and a loss scale of ",
                                 scaler_->scale(),
                                 ", expected 1 and 1: .grad would hold something else than gradients. "
                                 "Hint: torch::autograd::grad(..., create_graph) and one backward of the whole loss."));
}

void State::backward(const at::Tensor& loss, const BackwardOptions& options) {
  relay_.keeping([&] { check_backward(loss, options); });
  const torch_hooks::NormalMode normal;
  try {
    run_pass(loss, options);
  } catch (const CommError&) {
    relay_.telling([] { throw; });
  } catch (const std::exception& e) {
    give_pass_up(e.what());
    throw;
  } catch (...) {
    give_pass_up("an exception that is no std::exception");
    throw;
  }
}

// Without a loss: what passes before have left is taken, and the micro-batch ends.
void State::run_pass(const at::Tensor& loss, const BackwardOptions& options) {
  auto& page = observe::status_page();
  in_forward_ = false;
  end_activations();
  trace_.begin_phase(observe::TraceKind::Backward);
  shown_unit_ = -1;
  page.set_phase(observe::StatusPhase::Backward);
  if (passes_ == 0) choose_active();
  if (options.recoverable && taken_passes_ > 0 && !open_) copy_sums();
  const bool retains = options.retain_graph || options.create_graph;
  const bool boundary = settings_.managed_gradient_accumulation && micro_step_ + 1 == accumulation_ && !retains;
  for (const auto& group : groups_) group->begin_pass(taken_passes_ == 0, boundary, options.create_graph);
  reduce_next_ = 0;
  in_flight_.clear();
  prefetcher_->begin_backward();
  reads_ahead_ = boundary && !delays() && !pending_;
  if (loss.defined()) run_autograd(loss, options);
  if (activations_ && !retains) activations_->end_backward();
  page.set_phase(observe::StatusPhase::Reduce);
  if (options.create_graph) {
    if (!open_) unused_ = reduced_names();  // a later pass takes the gradients, and sees which are there
  } else {
    note_unused(/*check=*/loss.defined() && !retains);
    reduce_ready_groups();
    finish_reductions(0);
    ++taken_passes_;
  }
  for (const auto& group : groups_) group->autograd().end_pass();
  prefetcher_->end_pass();
  trace_.end_phase();
  count_bytes();
  ++passes_;
  open_ = retains;
  if (!open_) {
    ++micro_step_;
    backward_since_step_ = true;
    touched_ = false;
    forget_sums();
  }
  page.set_phase(observe::StatusPhase::Idle);
}

void State::run_autograd(const at::Tensor& loss, const BackwardOptions& options) {
  const double factor = scaler_->scale() / static_cast<double>(accumulation_);
  const auto scaled = factor == 1.0 ? loss : loss.to(at::kFloat) * factor;
  const BackwardScope scope(!device_.is_cpu());
  in_backward_ = true;
  if (blocks_) blocks_->open(true);
  const auto close = [&] {
    in_backward_ = false;
    if (blocks_) blocks_->open(false);
  };
  try {
    torch::autograd::backward({scaled}, {}, options.retain_graph || options.create_graph, options.create_graph);
  } catch (...) {
    close();
    throw;
  }
  close();
}

std::vector<std::string> State::reduced_names() const {
  std::vector<std::string> names;
  for (const auto* group : reduce_order_)
    for (const auto& member : group->members()) names.push_back(member.name);
  return names;
}

// Parameters that no pass of the micro-batch had a gradient for.
void State::note_unused(bool check) {
  std::vector<std::string> missing;
  for (auto* group : reduce_order_)
    for (auto& name : group->flush_missing()) missing.push_back(std::move(name));
  if (open_)
    std::erase_if(missing, [&](const std::string& name) {
      return std::find(unused_.begin(), unused_.end(), name) == unused_.end();
    });
  unused_ = std::move(missing);
  if (check && !unused_.empty() && !settings_.zero.ignore_unused_parameters)
    throw ConfigError(where("backward") + "no gradient for parameter " + unused_.front() +
                      (unused_.size() > 1 ? base::join(" and ", unused_.size() - 1, " more") : "") +
                      ", and zero_optimization.ignore_unused_parameters is false");
}

// Groups that were taken frozen and of which a parameter requires grad by now, a line each.
std::string State::unfrozen_units() const {
  std::string names;
  for (const auto& group : groups_)
    if (!group->trainable() && group->autograd().activity_changed()) names += group->name() + "\n";
  return names;
}

void State::compare_unfrozen(const char* what) {
  if (const auto text = disagreement(*comm_, where(what) + "the units with unfrozen parameters", unfrozen_units());
      !text.empty())
    throw ConfigError(text + ". Hint: call requires_grad_() alike on every rank.");
}

void State::admit_unfrozen() {
  if (unfrozen_units().empty()) return;
  if (pending_) background_.wait();
  update_->settle();
  for (const auto& group : groups_) {
    if (group->trainable() || !group->autograd().activity_changed()) continue;
    try {
      group->become_trainable([this] { make_update(); });
    } catch (...) {
      make_update();
      throw;
    }
    order_reductions();
  }
}

// A step begins: which parameters it is of.
void State::choose_active() {
  const auto changed = [](const auto& group) { return group->autograd().activity_changed(); };
  if (std::none_of(groups_.begin(), groups_.end(), changed)) return;
  if (!unfrozen_units().empty()) compare_unfrozen("backward");
  admit_unfrozen();
  if (pending_) background_.wait();  // it goes by what was chosen before
  for (const auto& group : groups_) group->choose_active();
}

void State::close_micro_batch() { run_pass(at::Tensor(), {}); }

void State::copy_sums() {
  try {
    for (const auto& group : groups_) group->copy_sums();
  } catch (...) {  // half a copy is none
    for (const auto& group : groups_) group->forget_sums();
    throw;
  }
  copied_passes_[0] = passes_;
  copied_passes_[1] = taken_passes_;
}

void State::forget_sums() {
  if (std::exchange(copied_passes_[1], 0) == 0) return;
  for (const auto& group : groups_) group->forget_sums();
}

void State::begin_accumulation() {
  micro_step_ = passes_ = taken_passes_ = 0;
  open_ = touched_ = false;
}

void State::on_gradient(int group, std::size_t member) {
  auto& of = *groups_[static_cast<std::size_t>(group)];
  if (in_backward_) {
    touched_ = true;
    if (of.take_gradient(member)) reduce_ready_groups();
    return;
  }
  of.autograd().drop_foreign(member);
  if (BackwardScope::active()) return;  // another Engine's
  relay_.keeping([&] {
    throw ConfigError(
        where("backward") + "a gradient of " + of.members()[member].name +
        " arrived outside Engine::backward. Hint: call engine.backward(loss) instead of loss.backward().");
  });
}

// Reductions begin in one fixed order on all ranks, whatever the order in which gradients arrive,
// so that a parameter unused on one rank only cannot mix up the collectives.
void State::reduce_ready_groups() {
  const bool overlap = settings_.zero.overlap_comm.value_or(stage_ == 3 || blocks_ != nullptr);
  while (reduce_next_ < reduce_order_.size() && reduce_order_[reduce_next_]->all_taken()) {
    auto* group = reduce_order_[reduce_next_++];
    // What is reduced where it lies costs no memory while it waits.
    finish_reductions(step::reductions_beside(stage_, blocks_ != nullptr, overlap, in_flight_.size()));
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

// --- a pass that failed -------------------------------------------------------------------------

void State::give_pass_up(const std::string& error) noexcept {
  try {
    if (comm_->size() == 1) {
      drop_micro_batch();
    } else {
      failed_ = error;
      relay_.keep(where("backward") + error);
    }
  } catch (const std::exception& e) {  // what is under way failed as well
    relay_.tell(e.what());
  }
}

// The micro-batch under way never was. What it has added to those before it cannot be told apart any more: without a
// copy they go with it.
void State::drop_micro_batch() {
  const bool copied = copied_passes_[1] > 0, all = micro_step_ == 0 || (touched_ && !copied);
  for (const auto& group : groups_)
    group->discard(all ? ParamGroup::Back::ToNothing : copied ? ParamGroup::Back::ToCopy : ParamGroup::Back::ToBefore);
  if (copied) passes_ = copied_passes_[0], taken_passes_ = copied_passes_[1];
  forget_sums();
  if (all) begin_accumulation();
  open_ = touched_ = in_forward_ = false;
  in_flight_.clear();
  if (!pending_) update_->settle();  // what was read ahead
  end_activations();
  if (activations_) activations_->end_backward();
  prefetcher_->end_pass();
  trace_.end_phase();
  observe::status_page().set_phase(observe::StatusPhase::Idle);
}

std::int64_t State::discard_micro_batch() {
  relay_.keeping([&] {
    if (gathered_scopes_ > 0)
      throw ConfigError(where("discard_micro_batch") + "called inside a scope of gathered_parameters");
  });
  return relay_.telling([&] {
    failed_.clear();
    drop_micro_batch();
    if (comm_->size() == 1) return micro_step_;
    const auto all = comm_->all_gather_bytes(std::to_string(micro_step_));
    for (std::size_t r = 0; r < all.size(); ++r)
      if (all[r] != all[0])
        throw ConfigError(where("discard_micro_batch") + base::join("keeps ", all[0], " micro-batches on rank 0 and ",
                                                                    all[r], " on rank ", r,
                                                                    ": the ranks did not fail at the same place"));
    relay_.forget();
    return micro_step_;
  });
}

}  // namespace zero::engine
