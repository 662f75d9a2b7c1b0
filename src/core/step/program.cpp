// See program.h.
#include "step/program.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "optim/clipping.h"
#include "step/tiers.h"

namespace zero::step {

StepProgram::StepProgram(const RunFacts& facts, const std::vector<GroupFacts>& groups, Backend backend, Memory& memory,
                         optim::LossScaler& scaler, Observer& observer,
                         std::function<void(const std::string&)> diverged)
    : facts_(facts),
      group_facts_(groups),
      c_{facts_, backend, memory, observer},
      scaler_(scaler),
      counts_(facts.boundary_by_count) {
  std::vector<Unshardable*> units;
  bool in_file = false;
  for (std::size_t g = 0; g < group_facts_.size(); ++g) {
    const auto& group = group_facts_[g];
    groups_.push_back(std::make_unique<Group>(c_, group, static_cast<int>(g)));
    units.push_back(groups_.back()->params.get());
    unshards_ |= group.sharding.params;
    delayed_ |= group.delayed;
    in_file |= group.in_file();
  }
  order_reductions();
  serve_blocks();
  make_optimizer_step();
  prefetcher_ =
      std::make_unique<step::Prefetcher>(std::move(units),
                                         step::Prefetcher::Policy{.ahead = facts_.prefetch_numel,
                                                                  .max_live = facts_.max_live_numel,
                                                                  .max_reuse = facts_.max_reuse_numel,
                                                                  .fetch_ahead = in_file ? facts_.fetch_ahead : 0},
                                         std::move(diverged));
}

void StepProgram::order_reductions() {
  reduce_order_.clear();
  for (const auto g : reduce_order(group_facts_)) reduce_order_.push_back(groups_[g].get());
}

void StepProgram::make_optimizer_step() {
  const auto kept = kept_bytes(facts_, group_facts_);
  c_.memory.ledger().book(Tier::Host, Purpose::Other, kept - kept_);
  kept_ = kept;
  optimizer_.reset();  // frees its buffers for the new one
  optimizer_ = std::make_unique<OptimizerStep>(c_, groups_);
}

// Gradients that need no conversion are allocated in memory that peers can read.
void StepProgram::serve_blocks() {
  for (const auto& group : group_facts_) {
    if (!group.trainable || !facts_.peer_reduces(group)) continue;
    c_.memory.serve_blocks(group.sharding.grads ? Purpose::ReduceBuffers : Purpose::Gradients);
    if (group.precision.reduce != group.precision.param) continue;
    for (std::size_t i = 0; i < group.layout.num_parameters(); ++i)
      c_.memory.serve(group.layout.parameter_numel(i) * width(group.precision.param) + step::kReadableOverhead);
  }
}

void StepProgram::initialise(int group, View values, bool broadcast) {
  auto& g = *groups_[static_cast<std::size_t>(group)];
  if (broadcast) g.params->broadcast(values);
  g.initialise(values);
}

void StepProgram::initialise_part(int group, std::int64_t begin, View values) {
  groups_[static_cast<std::size_t>(group)]->initialise_part(begin, values);
}

void StepProgram::complete_initialisation(int group) {
  groups_[static_cast<std::size_t>(group)]->complete_initialisation();
}

// --- forward and backward ---------------------------------------------------------------------

void StepProgram::use(std::span<const int> groups, bool training) {
  if (unshards_) prefetcher_->use(groups.data(), static_cast<int>(groups.size()), training);
}

void StepProgram::begin_use(std::span<const int> groups, bool training) {
  prefetcher_->begin_use(groups.data(), static_cast<int>(groups.size()), training);
}

void StepProgram::end_use(std::span<const int> groups) noexcept {
  prefetcher_->end_use(groups.data(), static_cast<int>(groups.size()));
}

void StepProgram::begin_backward(const PassOptions& pass) {
  pass_ = pass;
  in_pass_ = true;
  if (pass.recoverable && accumulated_.taken_passes > 0 && !accumulated_.open) save_copies();
  const bool boundary = counts_ && accumulated_.micro_batches + 1 == facts_.accumulation && !pass.retains;
  for (const auto& group : groups_) group->grads->begin_micro_step(accumulated_.taken_passes == 0, boundary);
  reduce_next_ = 0;
  reducing_.clear();
  prefetcher_->begin_backward();
  // Only if the next update belongs to this step and no other update is pending.
  reads_ahead_ = boundary && !delays() && !pending_;
  c_.memory.open_blocks(true);
}

void StepProgram::save_copies() {
  try {
    for (const auto& group : groups_) group->grads->save_copy();
  } catch (...) {  // discard an incomplete copy
    for (const auto& group : groups_) group->grads->drop_copy();
    throw;
  }
  copied_ = accumulated_;
}

void StepProgram::drop_copies() {
  if (std::exchange(copied_, {}).taken_passes == 0) return;
  for (const auto& group : groups_) group->grads->drop_copy();
}

bool StepProgram::accepts_gradient(int group, int member) const {
  return groups_[static_cast<std::size_t>(group)]->grads->accepts(member);
}

void StepProgram::gradient(int group, int member, View arrived, bool peer_readable) {
  note_gradient();
  if (groups_[static_cast<std::size_t>(group)]->grads->take(member, arrived, peer_readable)) reduce_ready();
}

// Reductions start in one order on all ranks, independent of the order in which gradients arrive, so that a parameter
// that one rank does not use cannot change the order of collectives.
void StepProgram::reduce_ready() {
  while (reduce_next_ < reduce_order_.size() && reduce_order_[reduce_next_]->grads->all_taken()) {
    auto* group = reduce_order_[reduce_next_++];
    // A group that is reduced and kept in place needs no memory while it waits.
    const bool waits_free = facts_.peer_reduces(group->facts) && !group->facts.sharding.grads;
    finish_reductions(waits_free ? reducing_.size() : facts_.overlap_reduce ? 1 : 0);
    group->grads->begin_reduce();
    reducing_.push_back(group);
    if (reads_ahead_) optimizer_->read_ahead(reduce_next_, reduce_order_.size());
  }
}

// A reduction may be finished early, which depends on timing, only if no collective follows: for reductions by peers'
// reads.
void StepProgram::finish_reductions(std::size_t most_in_flight) {
  while (!reducing_.empty()) {
    auto* oldest = reducing_.front();
    const bool early = facts_.peer_reduces(oldest->facts) && oldest->grads->reduced();
    if (reducing_.size() <= most_in_flight && !early) return;
    oldest->grads->finish_reduce();
    reducing_.pop_front();
  }
}

std::vector<std::pair<int, int>> StepProgram::fill_missing() {
  std::vector<std::pair<int, int>> missing;
  if (pass_.keeps_graph) return missing;
  for (auto* group : reduce_order_)
    for (const int member : group->grads->fill_missing()) missing.emplace_back(group->index, member);
  return missing;
}

void StepProgram::end_backward() {
  c_.memory.open_blocks(false);
  if (!pass_.keeps_graph) {
    fill_missing();
    reduce_ready();
    finish_reductions(0);
    ++accumulated_.taken_passes;
  }
  prefetcher_->end_pass();
  in_pass_ = false;
  ++accumulated_.passes;
  accumulated_.open = pass_.retains;
  if (accumulated_.open) return;
  ++accumulated_.micro_batches;
  accumulated_.touched = false;
  drop_copies();
}

KeptGrads StepProgram::discard(bool everything) {
  c_.memory.open_blocks(false);
  const bool copied = !everything && copied_.taken_passes > 0;
  const bool all = everything || accumulated_.micro_batches == 0 || (accumulated_.touched && !copied);
  const auto kept = all ? KeptGrads::None : copied ? KeptGrads::Copy : KeptGrads::All;
  // Complete micro-batches are not touched: they may have been reduced for the update.
  if (std::exchange(in_pass_, false) || accumulated_.open || all)
    for (const auto& group : groups_) group->grads->discard(kept);
  if (copied) accumulated_ = copied_;
  drop_copies();
  if (all) accumulated_ = {};
  accumulated_.open = accumulated_.touched = false;
  reducing_.clear();
  if (!pending_) optimizer_->settle();  // drops prefetched tiles
  prefetcher_->end_pass();
  return kept;
}

double StepProgram::norm() {
  ZERO_CHECK(at_boundary(), "[StepProgram::norm] called before the last micro-batch");
  close_accumulation();
  if (!accumulated_.squares) accumulated_.squares = sum_of_squares();
  return outcome_of(*accumulated_.squares).norm;
}

void StepProgram::close_accumulation() {
  if (counts_ || std::exchange(accumulated_.closed, true)) return;
  for (auto* group : reduce_order_) group->grads->close_accumulation();
}

void StepProgram::set_active(int group, int member, bool active) {
  groups_[static_cast<std::size_t>(group)]->grads->set_active(member, active);
}

bool StepProgram::at_boundary() const {
  return counts_ ? accumulated_.micro_batches == facts_.accumulation : accumulated_.micro_batches > 0;
}

// --- step() -----------------------------------------------------------------------------------

// Adds group by group and rank by rank in one order: the same bits on every rank and under every sharding policy.
double StepProgram::sum_of_squares() {
  double mine = 0;
  for (const auto* group : reduce_order_) mine += c_.backend.tensors.sum_of_squares(group->index);
  double total = 0;
  for (const double part : c_.backend.comm.exchange(mine)) total += part;
  return total;
}

StepOutcome StepProgram::outcome_of(double total) const {
  const double norm = std::sqrt(total) * static_cast<double>(facts_.postmultiply) / scaler_.scale();
  return {.acted = true,
          .overflow = facts_.checks_overflow && !std::isfinite(total),
          .norm = std::isfinite(norm) ? norm : -1};
}

StepOutcome StepProgram::step() {
  if (!at_boundary()) return {};
  prefetcher_->end_pass();  // an evaluation may have left groups unsharded
  close_accumulation();
  const double scale = scaler_.scale();
  const bool delay = delays();
  const double clip = accumulated_.clip.value_or(facts_.clip);
  const auto squares = accumulated_.squares;
  step::NormRequest request{{}, scale, clip, facts_.postmultiply, facts_.checks_overflow};
  for (const auto* group : reduce_order_) request.groups.push_back(group->index);
  // Where the norm is in the GPU's memory, the update is enqueued before the host knows it.
  const bool enqueued =
      facts_.updates_together && !delay && !pending_ && !squares && c_.backend.tensors.begin_norm(request);
  if (enqueued) {
    begin_apply(std::nullopt);
    apply();
  }
  auto outcome = outcome_of(enqueued ? c_.backend.tensors.end_norm() : squares ? *squares : sum_of_squares());
  if (enqueued) c_.backend.optimizer.end_update(!outcome.overflow);
  outcome.give_up = scaler_.update(outcome.overflow);
  ++step_;
  accumulated_ = {};
  outcome.updated = finish_delayed();
  if (outcome.give_up) return outcome;
  if (!outcome.overflow) {
    if (!enqueued) {
      begin_apply(optim::gradient_factor(scale, outcome.norm, clip, facts_.postmultiply));
      if (delay) {
        pending_ = true;
        c_.backend.optimizer.run_async([this] { optimizer_->run(OptimizerStep::To::PendingParams, [](Group&) {}); });
      } else {
        apply();
        c_.backend.optimizer.end_update(true);
      }
    }
    outcome.updated |= !delay;
  }
  for (const auto& group : groups_) group->grads->clear();
  prefetcher_->fetch_first();
  return outcome;
}

void StepProgram::begin_apply(std::optional<float> factor) {
  for (const auto& group : groups_) group->grads->hand_over();
  c_.backend.optimizer.begin_update(factor);
}

void StepProgram::apply() {
  optimizer_->run(OptimizerStep::To::Params, [this](Group& group) { all_gather(group); });
  finish_all_gathers(0);
}

// Makes the result of the background update current. Returns whether there was one.
bool StepProgram::finish_delayed() {
  if (!pending_.exchange(false)) return false;
  c_.backend.optimizer.join();
  for (const auto& group : groups_) {
    group->params_from_pending();
    all_gather(*group);
  }
  finish_all_gathers(0);
  c_.backend.optimizer.end_update(true);
  return true;
}

void StepProgram::all_gather(Group& group) {
  finish_all_gathers(facts_.allgather_numel - group.facts.padded());
  group.params->begin_all_gather();
  gathering_.push_back(&group);
}

// Waits for the oldest all-gathers of updated parameters until at most numel_under_way elements are pending.
void StepProgram::finish_all_gathers(std::int64_t numel_under_way) {
  std::int64_t under_way = 0;
  for (const auto* group : gathering_) under_way += group->facts.padded();
  while (!gathering_.empty() && (under_way > numel_under_way || numel_under_way <= 0)) {
    under_way -= gathering_.front()->facts.padded();
    gathering_.front()->params->finish_all_gather();
    gathering_.pop_front();
  }
}

// --- between steps ----------------------------------------------------------------------------

void StepProgram::flush() {
  if (!pending_) return optimizer_->settle();
  prefetcher_->end_pass();
  c_.backend.comm.barrier();  // no rank reads a shard in place any more
  finish_delayed();
  optimizer_->settle();
  prefetcher_->fetch_first();
}

void StepProgram::begin_replacing() {
  prefetcher_->end_pass();
  if (pending_.exchange(false)) {
    c_.backend.optimizer.join();
    c_.backend.optimizer.end_update(true);
  }
  optimizer_->settle();
}

void StepProgram::join_update() {
  if (pending_) c_.backend.optimizer.join();
}

void StepProgram::end_replacing(int only) {
  const auto replaced = [only](const auto& group) { return only < 0 || group->index == only; };
  for (const auto& group : groups_) {
    if (!replaced(group)) continue;
    group->params_from_masters();
    group->params->begin_all_gather();
  }
  for (const auto& group : groups_)
    if (replaced(group)) group->params->finish_all_gather();
}

void StepProgram::admit(int group, const GroupFacts& facts) {
  join_update();
  optimizer_->settle();
  auto& admitted = *groups_[static_cast<std::size_t>(group)];
  auto& known = group_facts_[static_cast<std::size_t>(group)];
  const auto before = std::exchange(known, facts);
  try {
    admitted.become_trainable();
    make_optimizer_step();
  } catch (...) {
    admitted.become_frozen();
    known = before;
    admitted.grads = GradStorage::make(c_, known, group);
    make_optimizer_step();
    throw;
  }
  serve_blocks();
  if (accumulated_.passes > 0) admitted.grads->begin_micro_step(/*first=*/true, /*boundary=*/false);
  admitted.params->forget_secondary();
  order_reductions();
}

}  // namespace zero::step
