// One training step: uses of parameters and the update. What lies between, backward, is in state_backward.cpp.
#include "engine/state.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/SmallVector.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/idle_memory.h"
#include "engine/model_checks.h"
#include "observe/status_page.h"
#include "optim/clipping.h"
#include "step/stage_rules.h"

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
  trace_.begin_phase(observe::TraceKind::Forward);
  shown_unit_ = -1;
  observe::status_page().set_step(global_steps_, static_cast<int>(micro_step_));
  observe::status_page().set_phase(observe::StatusPhase::Forward);
}

// In a thread with several engines the one whose parameter was used last says how activations are kept.
void State::end_activations() const {
  if (activations_ && torch_hooks::saved_tensor_policy() == activations_) torch_hooks::set_saved_tensor_policy(nullptr);
}

void State::before_use(const int* tags, int count, const char*) {
  if (!failed_.empty()) require_usable("forward");
  begin_forward();
  observe::status_page().note_use();
  if (!in_backward_ && torch_hooks::saved_tensor_policy() != activations_)
    torch_hooks::set_saved_tensor_policy(activations_);
  if (const int unit = members_[static_cast<std::size_t>(tags[0])].group; unit != shown_unit_.exchange(unit)) {
    const auto& name = groups_[static_cast<std::size_t>(unit)]->name();
    observe::status_page().set_unit(name);
    trace_.enter(name);
    count_bytes();
  }
  if (stage_ < 3) return;
  const auto groups = groups_of(tags, count, members_);
  const bool training = in_backward_ || at::GradMode::is_enabled();
  const auto use = [&] { prefetcher_->begin_use(groups.data(), static_cast<int>(groups.size()), training); };
  if (comm_->size() == 1) {  // nobody waits for this rank, which may try another batch
    const torch_hooks::NormalMode normal;
    use();
  } else {
    relay_.telling(use);
  }
}

void State::after_use(const int* tags, int count) noexcept {
  if (stage_ < 3) return;
  const auto groups = groups_of(tags, count, members_);
  prefetcher_->end_use(groups.data(), static_cast<int>(groups.size()));
}

bool State::before_write(int tag, const char* op) {
  if (modifying_scopes_ > 0) return true;
  const auto& member = members_[static_cast<std::size_t>(tag)];
  const auto& group = *groups_[static_cast<std::size_t>(member.group)];
  return relay_.keeping([&]() -> bool {
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
    if (!torch_hooks::is_intercepted(parameter.tensor))
      throw ConfigError(
          where(what) + "parameter " + parameter.name +
          " was replaced behind the Engine (module.to(...), set_data, torch::load). Hint: move, cast and load the "
          "module before the Engine takes it, and let the recipe choose the dtype; in a scope of "
          "gathered_parameters(true) write with copy_.");
  }
  for (const auto& group : groups_)
    if (const auto text = group->autograd().find_meddling(/*first=*/passes_ == 0, what == std::string("step"));
        !text.empty())
      throw ConfigError(where(what) + text);
  check_hooks(groups_, where(what));
}

// Before a call that changes or sends something.
void State::require_usable(const char* what) {
  if (!relay_.ended().empty())
    throw CommError(where(what) + "called after an error that ended the run: " + relay_.ended());
  if (failed_.empty()) return;
  relay_.tell(failed_);
  throw ConfigError(where(what) + "called after a backward that failed (" + failed_ +
                    "). Hint: where every rank catches the same error, call engine.discard_micro_batch() on all of "
                    "them; else let the error end the program.");
}

// --- step -------------------------------------------------------------------------------------

bool State::at_boundary() const {
  if (!settings_.managed_gradient_accumulation) return micro_step_ > 0 || open_;
  return micro_step_ + (backward_since_step_ ? 0 : 1) == accumulation_;
}

void State::require_boundary(const char* what) {
  require_usable(what);
  if (open_)
    throw ConfigError(where(what) +
                      "called within a micro-batch: the last backward() kept its graph. Hint: call it "
                      "after step() has acted.");
  if (micro_step_ != 0)
    throw ConfigError(where(what) + base::join("called after ", micro_step_, " of ", accumulation_,
                                               " micro-batches. Hint: call it after step() has acted."));
}

// What every rank has to have set alike, beside the configuration: which parameters are frozen, and the rates.
std::uint64_t State::hash_of_choices() const {
  std::string text;
  for (const auto& group : groups_)
    for (std::size_t i = 0; i < group->members().size(); ++i) text += group->autograd().active(i) ? '1' : '0';
  const auto& rates = optimizer_->set_rates();
  text.append(reinterpret_cast<const char*>(rates.data()), rates.size() * sizeof(double));
  return XXH3_64bits(text.data(), text.size());
}

double State::norm_and_overflow(bool* overflow) {
  struct Mine {
    double squares = 0;
    std::uint64_t choices = 0;
  } mine;
  if (sums_) sums_->fetch();
  for (const auto* group : reduce_order_) mine.squares += group->sum_of_squares();
  double total = mine.squares;
  if (comm_->size() > 1) {
    mine.choices = hash_of_choices();
    // Summed in rank order on every rank: the same bits everywhere and at every stage.
    total = 0;
    std::string different;
    observe::TraceSpan wait(trace_.trace(), observe::TraceKind::ExchangeWait, "norm");
    const auto all = comm_->all_gather_bytes({reinterpret_cast<const char*>(&mine), sizeof mine});
    std::uint64_t of_first = 0;
    for (std::size_t r = 0; r < all.size(); ++r) {
      Mine theirs;
      std::memcpy(&theirs, all[r].data(), sizeof theirs);
      total += theirs.squares;
      if (r == 0) of_first = theirs.choices;
      if (theirs.choices != of_first) different += base::join(different.empty() ? "" : ", ", r);
    }
    if (!different.empty())
      throw ConfigError(where("step") +
                        "got other frozen parameters, or other rates of set_lr(), on rank 0 than on rank " + different +
                        ". Hint: call requires_grad_() and set_lr() alike on every rank.");
  }
  const bool checked = settings_.precision != config::Precision::Bf16 || settings_.check_grad_overflow;
  *overflow = checked && !std::isfinite(total);
  const double norm = std::sqrt(total) * static_cast<double>(postmultiply_) / scaler_->scale();
  return std::isfinite(norm) ? norm : -1;
}

StepResult State::step() {
  relay_.keeping([&] {
    require_usable("step");
    check_parameters("step");
    check_no_new_parameters(*model_, where("step"));
    if (gathered_scopes_ > 0) throw ConfigError(where("step") + "called inside a scope of gathered_parameters");
  });
  return relay_.telling([&] {
    if (open_) close_micro_batch();
    StepResult result;
    result.lr = optimizer_->lr(0);
    result.loss_scale = scaler_->scale();
    result.global_step = global_steps_;
    result.grad_norm = last_norm_;
    backward_since_step_ = false;
    end_activations();
    const bool act = settings_.managed_gradient_accumulation ? micro_step_ == accumulation_ : micro_step_ > 0;
    if (!act) return result;
    const step::Prefetcher::Alone alone(*prefetcher_, where("step"));
    auto& page = observe::status_page();
    page.set_step(global_steps_);
    page.set_phase(observe::StatusPhase::Step);
    trace_.begin_phase(observe::TraceKind::Act);
    prefetcher_->end_pass();  // an evaluation since may have left groups gathered
    if (!settings_.managed_gradient_accumulation)
      for (auto* group : reduce_order_) group->close_accumulation();

    bool overflow = false;
    result.grad_norm = last_norm_ = norm_and_overflow(&overflow);
    relay_.forget();
    result.overflow = overflow;
    const double scale = scaler_->scale();
    const bool give_up = scaler_->update(overflow);
    const bool late = delays();
    ++global_steps_;
    begin_accumulation();
    result.updated = finish_update();
    if (overflow) {
      ++skipped_steps_;
      if (give_up) fail_numerically(scaler_->state().floor);
    } else {
      const float factor = optim::gradient_factor(scale, result.grad_norm, settings_.gradient_clipping, postmultiply_);
      apply(factor, late);
      result.updated |= !late;
    }
    for (const auto& group : groups_) group->autograd().drop();
    prefetcher_->fetch_first();
    result.loss_scale = scaler_->scale();
    result.global_step = global_steps_;
    page.set_step(global_steps_);
    page.set_phase(observe::StatusPhase::Idle);
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
  const auto names = comm_->all_gather_bytes(mine);
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
