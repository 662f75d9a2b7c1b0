#include "engine/prefetcher.h"

#include <algorithm>

#include "engine/param_group.h"

namespace zero::engine {

Prefetcher::Prefetcher(std::vector<ParamGroup*> groups, std::int64_t ahead_numel,
                       std::function<void(const std::string&)> diverged)
    : groups_(std::move(groups)), ahead_numel_(ahead_numel), on_divergence_(std::move(diverged)) {}

void Prefetcher::note_use(int group, bool training) {
  if (group == last_) return;
  last_ = group;
  if (training) seen_[phase_].push_back(group);
  const auto& order = order_[phase_];
  if (order.empty()) return;
  const std::size_t next = at_start_ ? 0 : position_ + 1;
  at_start_ = false;
  if (next < order.size() && order[next] == group) {
    position_ = next;
    return;
  }
  // Somewhere else in the order (an evaluation starts again, a module was skipped): go on there.
  for (std::size_t k = 0; k < order.size(); ++k) {
    const auto at = (next + k) % order.size();
    if (order[at] != group) continue;
    position_ = at;
    break;
  }
  if (training && !diverged_) {
    diverged_ = true;
    ++divergences_;
    on_divergence_(groups_[static_cast<std::size_t>(group)]->name());
  }
}

int Prefetcher::expected_next() const {
  const auto& order = order_[phase_];
  for (std::size_t k = position_ + 1; k < order.size(); ++k) {
    const auto* group = groups_[static_cast<std::size_t>(order[k])];
    if (order[k] == last_ || group->root() || !group->rests_sharded() || group->gathers_in_place()) continue;
    return group->layout().padded_numel() <= ahead_numel_ ? order[k] : -1;
  }
  return -1;
}

void Prefetcher::release_others(const int* groups, int count, int next) {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    auto* group = groups_[g];
    if (group->residency() == ParamGroup::Residency::Sharded || group->root() || group->gathers_in_place()) continue;
    const int index = static_cast<int>(g);
    if (index != next && std::find(groups, groups + count, index) == groups + count) group->release();
  }
}

void Prefetcher::use(const int* groups, int count, bool training) {
  bool all_there = true;
  for (int i = 0; i < count; ++i) {
    const auto* group = groups_[static_cast<std::size_t>(groups[i])];
    all_there &= group->residency() == ParamGroup::Residency::Gathered;
  }
  if (pinned_ || (all_there && count == 1 && groups[0] == last_)) return;
  for (int i = 0; i < count; ++i) note_use(groups[i], training);
  const int next = order_[phase_].empty() || ahead_numel_ == 0 ? -1 : expected_next();
  if (!(all_there && groups_[static_cast<std::size_t>(last_)]->root())) release_others(groups, count, next);
  for (int i = 0; i < count; ++i) groups_[static_cast<std::size_t>(groups[i])]->finish_gather();
  if (next >= 0 && groups_[static_cast<std::size_t>(next)]->residency() == ParamGroup::Residency::Sharded)
    groups_[static_cast<std::size_t>(next)]->begin_gather();
}

void Prefetcher::release_all() {
  if (!pinned_)
    for (auto* group : groups_) group->release();
  at_start_ = true;
  last_ = -1;
}

void Prefetcher::begin_backward() {
  release_all();
  phase_ = kBackward;
}

void Prefetcher::end_pass() {
  release_all();
  for (const auto phase : {kForward, kBackward}) {
    if (!seen_[phase].empty()) order_[phase] = std::move(seen_[phase]);
    seen_[phase].clear();
  }
  phase_ = kForward;
  diverged_ = false;
}

void Prefetcher::pin_all() {
  for (auto* group : groups_) group->gather_copy();
  pinned_ = true;
}

void Prefetcher::unpin_all() {
  pinned_ = false;
  release_all();
}

}  // namespace zero::engine
