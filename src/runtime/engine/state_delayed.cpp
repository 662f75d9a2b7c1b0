// The update of a step: at once, or one step late (ZeRO-Offload's delayed parameter update, arXiv:2101.06840, section
// 5.2): the gradients of step i are applied in the background while step i + 1 runs forward and backward, and what came
// of them becomes visible at the end of step i + 1.
//
// [Note: what the background touches] Masters, moments, the gradients handed over and the parameters to come. The
// parameters in use, the gradients being made and the counters are the training thread's; both meet in finish_update().
#include <ATen/core/grad_mode.h>

#include "base/check.h"
#include "engine/state.h"

namespace zero::engine {

bool State::delays() const {
  return settings_.zero.delayed_update && global_steps_ >= settings_.zero.delayed_start_step;
}

// The gradients of this step are whole. Unless late, the parameters are new when this returns.
void State::apply(float factor, bool late) {
  for (const auto& group : groups_) group->hand_over_gradients();
  optimizer_->begin_step();
  if (!late) {
    update_->run(*optimizer_, factor, StagedUpdate::To::Parameters, [this](ParamGroup& group) { publish(group); });
    publish_within(0);
    optimizer_->end_step();
    return;
  }
  pending_ = true;
  background_.begin(
      [this, factor] { update_->run(*optimizer_, factor, StagedUpdate::To::NextParameters, [](ParamGroup&) {}); });
}

// What was applied in the background becomes what is computed with; true if there was something. All ranks call it
// together, when none reads parameters any more.
bool State::finish_update() {
  if (!pending_) return false;
  pending_ = false;
  {
    observe::TraceSpan wait(trace_.trace(), observe::TraceKind::UpdateWait, "delayed");
    background_.wait();
  }
  for (const auto& group : groups_) {
    group->adopt_next();
    publish(*group);
  }
  publish_within(0);
  optimizer_->end_step();
  return true;
}

double State::lr(int group) const {
  if (group < 0 || group >= optimizer_->num_parameter_groups())
    throw ConfigError(base::join("[Engine::lr] got parameter group ", group, ", expected 0 to ",
                                 optimizer_->num_parameter_groups() - 1));
  return optimizer_->lr(group);
}

void State::set_lr(int group, double lr) {
  relay_.keeping([&] {
    if (pending_) background_.wait();  // it looks at the rates
    optimizer_->set_lr(group, lr);
  });
}

void State::flush() {
  relay_.keeping([&] {
    require_usable("flush");
    if (pending_) require_boundary("flush");
  });
  relay_.telling([&] {
    if (!pending_) return update_->settle();
    const step::Prefetcher::Alone alone(*prefetcher_, where("flush"));
    prefetcher_->end_pass();
    comm_->barrier();  // nobody reads a shard in place any more
    finish_update();
    update_->settle();
    prefetcher_->fetch_first();
  });
}

// Between steps, an operator without grad mode reads parameters that lack the update on its way: an evaluation, most
// likely, of a model one step behind. It cannot be finished here: that is collective, and ranks may evaluate alone.
void State::require_current(const char* op) {
  if (at::GradMode::is_enabled() || in_forward_ || in_backward_ || passes_ > 0) return;
  relay_.keeping([&] {
    throw ConfigError(
        where("forward") + op +
        " reads parameters without grad mode between steps while a delayed update is on its way: they are "
        "one step behind. Hint: call engine.flush() on every rank before an evaluation.");
  });
}

void State::begin_replacing() {
  const step::Prefetcher::Alone alone(*prefetcher_, where("load_checkpoint"));
  prefetcher_->end_pass();
  if (pending_) {
    pending_ = false;
    background_.wait();
    optimizer_->end_step();  // the counters that are loaded next replace what it counts
  }
  update_->settle();
}

void State::publish(ParamGroup& group) {
  publish_within(settings_.zero.allgather_bucket_size - group.layout().padded_numel());
  group.begin_publish();
  publishing_.push_back(&group);
}

// Waits for the oldest all-gathers of updated parameters until those under way have at most `numel` elements.
void State::publish_within(std::int64_t numel) {
  std::int64_t under_way = 0;
  for (const auto* group : publishing_) under_way += group->layout().padded_numel();
  while (!publishing_.empty() && (under_way > numel || numel <= 0)) {
    under_way -= publishing_.front()->layout().padded_numel();
    publishing_.front()->finish_publish();
    publishing_.pop_front();
  }
}

}  // namespace zero::engine
