// See prefetcher.h.
#include "step/prefetcher.h"

#include <algorithm>
#include <map>
#include <numeric>

#include <zero/errors.h>

namespace zero::step {

Prefetcher::Prefetcher(std::vector<Unshardable*> groups, const Policy& policy,
                       std::function<void(const std::string&)> diverged)
    : groups_(std::move(groups)),
      policy_(policy),
      readers_(groups_.size()),
      on_divergence_(std::move(diverged)),
      pins_(groups_.size()) {
  std::map<int, int> known;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const auto next = static_cast<int>(members_.size());
    const int number = groups_[g]->module();
    const int module = number < 0 ? next : known.try_emplace(number, next).first->second;
    if (module == next) members_.emplace_back();
    module_of_.push_back(module);
    members_[static_cast<std::size_t>(module)].push_back(static_cast<int>(g));
  }
}

Prefetcher::Alone::Alone(Prefetcher& prefetcher, const std::string& where) : prefetcher_(prefetcher) {
  const Lock lock(prefetcher_.mutex_);
  for (std::size_t g = 0; g < prefetcher_.groups_.size(); ++g)
    if (prefetcher_.read_now(static_cast<int>(g)))
      throw ConfigError(where + "an operator of another thread is reading parameters of group " +
                        prefetcher_.groups_[g]->name() +
                        ". Hint: wait for forwards in other threads before calls that replace parameters.");
  ++prefetcher_.alone_;
}

Prefetcher::Alone::~Alone() {
  const Lock lock(prefetcher_.mutex_);
  --prefetcher_.alone_;
}

// Returns false if the group is pinned or an operator reads it; it then stays unsharded.
bool Prefetcher::reshard(int group) {
  if (pinned(group) || read_now(group)) return false;
  groups_[static_cast<std::size_t>(group)]->reshard();
  return true;
}

void Prefetcher::note_use(int module, bool training) {
  if (module == last_) return;
  last_ = module;
  // Forwards without a backward do not define an order.
  constexpr std::size_t kMostSeen = std::size_t{1} << 20;
  if (training && seen_[phase_].size() < kMostSeen) seen_[phase_].push_back(module);
  const auto& order = order_[phase_];
  if (order.empty()) return;
  const std::size_t next = at_start_ ? 0 : position_ + 1;
  at_start_ = false;
  if (next < order.size() && order[next] == module) {
    position_ = next;
    return;
  }
  // At another position in the order (a restarted evaluation, a skipped module): continue there.
  for (std::size_t k = 0; k < order.size(); ++k) {
    const auto at = (next + k) % order.size();
    if (order[at] != module) continue;
    position_ = at;
    break;
  }
  if (training && !diverged_) {
    diverged_ = true;
    ++divergences_;
    on_divergence_(groups_[static_cast<std::size_t>(members(module).front())]->name());
  }
}

bool Prefetcher::is_root(int module) const {
  return groups_[static_cast<std::size_t>(members(module).front())]->root();
}

// While it is unsharded.
bool Prefetcher::needs_memory(int group) const {
  const auto* g = groups_[static_cast<std::size_t>(group)];
  return g->rests_sharded() && !g->symmetric();
}

int Prefetcher::expected_next() const {
  const auto& order = order_[phase_];
  for (std::size_t k = position_ + 1; k < order.size(); ++k) {
    const auto& all = members(order[k]);
    if (order[k] == last_ || is_root(order[k]) ||
        std::none_of(all.begin(), all.end(), [&](int g) { return needs_memory(g); }))
      continue;
    return numel_of_module(order[k]) <= policy_.ahead ? order[k] : -1;
  }
  return -1;
}

bool Prefetcher::may_be_resharded(int group) const {
  return groups_[static_cast<std::size_t>(group)]->residency() != Unshardable::Residency::Sharded &&
         needs_memory(group);
}

std::int64_t Prefetcher::numel_of(int group) const { return groups_[static_cast<std::size_t>(group)]->padded_numel(); }

std::int64_t Prefetcher::numel_of_module(int module) const {
  std::int64_t numel = 0;
  for (const int g : members(module)) numel += numel_of(g);
  return numel;
}

std::int64_t Prefetcher::unsharded_bytes() const {
  const Lock lock(mutex_);
  std::int64_t unsharded = 0;
  for (const auto* group : groups_)
    if (group->rests_sharded() && group->residency() != Unshardable::Residency::Sharded)
      unsharded += group->whole_bytes();
  return unsharded;
}

std::int64_t Prefetcher::sharded_numel(int module) const {
  std::int64_t numel = 0;
  for (const int g : members(module))
    if (groups_[static_cast<std::size_t>(g)]->residency() == Unshardable::Residency::Sharded) numel += numel_of(g);
  return numel;
}

std::int64_t Prefetcher::live_numel() const {
  std::int64_t live = 0;
  for (const int g : held_)
    if (may_be_resharded(g)) live += numel_of(g);
  return live;
}

void Prefetcher::hold(int group) {
  if (!needs_memory(group)) return;  // never resharded to make room
  const auto at = std::lower_bound(held_.begin(), held_.end(), group);
  if (at == held_.end() || *at != group) held_.insert(at, group);
}

// In the expected order, which continues from forward to backward.
bool Prefetcher::used_soon(int module) const {
  std::int64_t between = 0;
  std::size_t at = at_start_ ? 0 : position_ + 1;
  for (int phase = phase_; phase <= kBackward && between <= policy_.max_reuse; ++phase, at = 0) {
    for (; at < order_[phase].size() && between <= policy_.max_reuse; ++at) {
      if (order_[phase][at] == module) return true;
      between += numel_of_module(order_[phase][at]);
    }
  }
  return false;
}

void Prefetcher::reshard_others(const std::vector<int>& modules, int next) {
  std::int64_t live = 0;  // elements that stay and that are needed
  for (const int module : modules) live += numel_of_module(module);
  if (next >= 0) live += numel_of_module(next);
  std::vector<int> others;
  for (const int g : held_) {
    if (!may_be_resharded(g) || module_of(g) == next ||
        std::find(modules.begin(), modules.end(), module_of(g)) != modules.end())
      continue;
    if (pinned(g) || (groups_[static_cast<std::size_t>(g)]->root() && !modules.empty()))
      live += numel_of(g);
    else
      others.push_back(g);
  }
  for (const int g : others) {
    if (policy_.max_reuse > 0 && live + numel_of(g) <= policy_.max_live && used_soon(module_of(g)))
      live += numel_of(g);
    else
      reshard(g);
  }
  forget_resharded();
}

void Prefetcher::forget_resharded() {
  std::erase_if(held_, [&](int g) {
    return groups_[static_cast<std::size_t>(g)]->residency() == Unshardable::Residency::Sharded;
  });
}

void Prefetcher::begin_use(const int* groups, int count, bool training) {
  const Lock lock(mutex_);
  if (alone_ != 0)
    throw ConfigError("[Engine::forward] parameters of group " + groups_[static_cast<std::size_t>(groups[0])]->name() +
                      " are read while another thread replaces them (step, load_checkpoint, gathered_parameters). "
                      "Hint: wait for that call before forwards in other threads.");
  use(groups, count, training);
  for (int i = 0; i < count; ++i) readers_[static_cast<std::size_t>(groups[i])].fetch_add(1, std::memory_order_relaxed);
}

void Prefetcher::end_use(const int* groups, int count) noexcept {
  for (int i = 0; i < count; ++i) readers_[static_cast<std::size_t>(groups[i])].fetch_sub(1, std::memory_order_release);
}

void Prefetcher::use(const int* groups, int count, bool training) {
  using Residency = Unshardable::Residency;
  const Lock lock(mutex_);
  bool all_there = true, kept = true;
  in_use_.clear();
  for (int i = 0; i < count; ++i) {
    all_there &= groups_[static_cast<std::size_t>(groups[i])]->residency() == Residency::Unsharded;
    kept &= pinned(groups[i]);
    if (std::find(in_use_.begin(), in_use_.end(), module_of(groups[i])) == in_use_.end())
      in_use_.push_back(module_of(groups[i]));
  }
  // A single rank may write a pinned group, so no collective may depend on it.
  if (kept || (all_there && in_use_.size() == 1 && in_use_[0] == last_)) return;
  for (const int module : in_use_) note_use(module, training);
  const int next = order_[phase_].empty() || policy_.ahead == 0 ? -1 : expected_next();
  if (!(all_there && is_root(last_))) reshard_others(in_use_, next);
  const auto begin = [&](int module) {
    for (const int g : members(module)) {
      if (groups_[static_cast<std::size_t>(g)]->residency() == Residency::Sharded)
        groups_[static_cast<std::size_t>(g)]->begin_unshard();
      hold(g);
    }
  };
  for (int i = 0; i < count; ++i) {
    groups_[static_cast<std::size_t>(groups[i])]->finish_unshard();
    hold(groups[i]);
  }
  for (const int module : in_use_)
    if (members(module).size() > 1) begin(module);
  if (next >= 0 && live_numel() + sharded_numel(next) <= policy_.max_live) begin(next);
  if (policy_.fetch_ahead > 0 && !order_[phase_].empty()) fetch_from(position_ + 1);
}

// Fetches the next shards in the phase's order that are in files and not fetched yet.
void Prefetcher::fetch_from(std::size_t position) {
  const auto& order = order_[phase_];
  int count = 0;
  for (auto k = position; k < order.size() && count < policy_.fetch_ahead; ++k)
    for (const int g : members(order[k])) {
      auto* group = groups_[static_cast<std::size_t>(g)];
      if (!group->rests_in_file() || group->residency() != Unshardable::Residency::Sharded) continue;
      group->begin_fetch();
      ++count;
    }
}

void Prefetcher::fetch_first() {
  const Lock lock(mutex_);
  if (policy_.fetch_ahead > 0 && !all_pinned()) fetch_from(0);
}

void Prefetcher::reshard_all() {
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) reshard(g);
  forget_resharded();
  for (auto* group : groups_) group->cancel_fetch();
  at_start_ = true;
  last_ = -1;
}

void Prefetcher::begin_backward() {
  const Lock lock(mutex_);
  phase_ = kBackward;
  at_start_ = true;
  last_ = -1;
  if (all_pinned()) return;
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g)
    if (groups_[static_cast<std::size_t>(g)]->symmetric()) reshard(g);
  reshard_others({}, -1);
  fetch_first();
}

void Prefetcher::end_pass() {
  const Lock lock(mutex_);
  reshard_all();
  for (const auto phase : {kForward, kBackward}) {
    if (!seen_[phase].empty()) order_[phase] = std::move(seen_[phase]);
    seen_[phase].clear();
  }
  phase_ = kForward;
  diverged_ = false;
}

void Prefetcher::pin(const std::vector<int>& groups) {
  const Lock lock(mutex_);
  for (const int g : groups) {
    auto& pins = pins_[static_cast<std::size_t>(g)];
    if (pins == 0) {  // otherwise an enclosing scope may have written it
      groups_[static_cast<std::size_t>(g)]->unshard_copy();
      hold(g);
      ++pinned_groups_;
    }
    ++pins;
  }
}

void Prefetcher::unpin(const std::vector<int>& groups) {
  const Lock lock(mutex_);
  for (const int g : groups) {
    if (--pins_[static_cast<std::size_t>(g)] != 0) continue;
    --pinned_groups_;
    reshard(g);
  }
  if (pinned_groups_ == 0) return reshard_all();
  forget_resharded();
}

void Prefetcher::pin_all() {
  std::vector<int> all(groups_.size());
  std::iota(all.begin(), all.end(), 0);
  pin(all);
}

void Prefetcher::unpin_all() {
  std::vector<int> all(groups_.size());
  std::iota(all.begin(), all.end(), 0);
  unpin(all);
}

}  // namespace zero::step
