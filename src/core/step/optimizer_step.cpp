// See optimizer_step.h.
#include "step/optimizer_step.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "step/tiers.h"
#include "step/whole_update.h"

namespace zero::step {
namespace {

bool goes_by_tiles(const Segment& segment) { return segment.tier == Tier::File || segment.param_travels; }

}  // namespace

OptimizerStep::OptimizerStep(const Context& context, const Groups& groups) : c_(context), groups_(groups) {
  const auto tile = c_.facts.tile_numel;
  std::int64_t most = 0, count = 0;
  for (const auto& group : groups_)
    for (std::size_t s = 0; s < group->facts.segments.size(); ++s) {
      const auto& segment = group->facts.segments[s];
      if (!goes_by_tiles(segment)) continue;
      count += (segment.numel + tile - 1) / tile;
      most = std::max(most, std::min(tile, segment.numel));
      const auto step = c_.facts.whole_segments ? segment.numel : tile;
      for (std::int64_t begin = 0; begin < segment.numel; begin += step)
        tiles_.push_back({group.get(), s, begin, std::min(step, segment.numel - begin)});
    }
  try {
    make_slots(most, std::min(count, c_.facts.tiles));
  } catch (...) {
    give_slots();
    throw;
  }
}

OptimizerStep::~OptimizerStep() { give_slots(); }

void OptimizerStep::give_slots() {
  for (auto& slot : slots_) {
    for (auto* under_way : {&slot.reads, &slot.writes, &slot.param_write}) under_way->settle();
    for (auto& state : slot.states) c_.memory.give(state);
    c_.memory.give(slot.param);
  }
  for (auto& scratch : scratch_) c_.memory.give(scratch);
}

void OptimizerStep::make_slots(std::int64_t numel, std::int64_t count) {
  bool params_in_file = false;
  int num_slots = 0;                           // the most
  std::optional<Dtype> param, master, states;  // the widest of the parameters that travel; of the states in files
  const auto widen = [](std::optional<Dtype>& widest, Dtype dtype) {
    if (!widest || width(dtype) > width(*widest)) widest = dtype;
  };
  for (const auto& tile : tiles_) {
    const auto& facts = tile.group->facts;
    if (segment_of(tile).tier == Tier::File)
      widen(master, facts.precision.master), widen(states, facts.precision.slots),
          num_slots = std::max(num_slots, facts.num_slots());
    if (!segment_of(tile).param_travels) continue;
    params_in_file |= facts.in_file();
    widen(param, facts.precision.param);
  }
  const auto rest = [&](Place place, Role role, Dtype dtype) {
    const auto stored = role == Role::StatesTile ? slot_numel(dtype, numel) : numel;
    return c_.memory.rest({.place = place, .tier = Tier::Host, .purpose = Purpose::Other, .role = role}, stored, dtype);
  };
  slots_.resize(static_cast<std::size_t>(count));
  for (auto& slot : slots_) {
    for (int state = 0; master && state <= num_slots; ++state)
      slot.states[state] = rest(Place::IoBuffer, Role::StatesTile, state == 0 ? *master : *states);
    if (param) slot.param = rest(params_in_file ? Place::IoBuffer : Place::PinnedHost, Role::ParamsTile, *param);
  }
}

std::unique_ptr<Observed> OptimizerStep::observe(const Tile& tile, OpKind kind, OpReason reason, Tier from, Tier to,
                                                 std::int64_t bytes) {
  return c_.observer.issued({.kind = kind,
                             .reason = reason,
                             .group = tile.group->index,
                             .bytes = bytes,
                             .from = from,
                             .to = to,
                             .numel = tile.numel});
}

void OptimizerStep::read_until(std::size_t end) {
  for (; read_ < std::min(end, tiles_.size()); ++read_) {
    auto& slot = slot_of(read_);
    slot.param_write.wait();
    slot.writes.wait();
    const auto& tile = tiles_[read_];
    if (segment_of(tile).tier != Tier::File) continue;
    slot.reads.begin(observe(tile, OpKind::FetchStates, OpReason::Arrives, Tier::File, Tier::Host, state_bytes(tile)));
    const auto& rests = tile.group->states[tile.segment];
    for (int k = 0; k <= tile.group->facts.num_slots(); ++k) {
      const auto& from = k == 0 ? rests.master : rests.slots[k - 1];
      slot.reads.add(
          c_.backend.tensors.read(part_of(slot, k, tile, from.dtype), part_of(k, from, tile.begin, tile.numel)));
    }
  }
}

void OptimizerStep::read_ahead(std::size_t done, std::size_t all) {
  if (c_.facts.pipeline_read) read_until(slots_.size() * done / all);
}

std::int64_t OptimizerStep::scratch_numel(const GroupFacts& facts, std::int64_t updated) const {
  const bool divided =
      std::any_of(facts.owners.begin(), facts.owners.end(), [](int owner) { return owner == kDivided; });
  return whole_update(c_.facts, facts).buffer() + (divided ? updated : 0);
}

// One for all updates of a run: new memory for each would cost more than its use.
View OptimizerStep::scratch_of(const Tile& tile, Tier tier) {
  const auto numel = scratch_numel(tile.group->facts, tile.numel);
  auto& scratch = scratch_[tier == Tier::Host];
  if (scratch.numel < numel) {
    c_.memory.give(scratch);
    auto most = numel;
    for (const auto& group : groups_)
      for (const auto& segment : group->facts.segments)
        if (group->facts.by_rule && (segment.tier == Tier::Device) == (tier == Tier::Device))
          most = std::max(
              most, scratch_numel(group->facts, goes_by_tiles(segment) ? std::min(segment.numel, c_.facts.tile_numel)
                                                                       : segment.numel));
    const auto place = tier == Tier::Host ? c_.host() : Place::Device;
    scratch = c_.memory.rest({.place = place, .tier = tier}, most, Dtype::F32);
  }
  return scratch.part(0, numel);
}

// What the update sends, until it ends.
std::vector<std::unique_ptr<Observed>> OptimizerStep::observe_owners(const Tile& tile) {
  std::vector<std::unique_ptr<Observed>> seen;
  const auto& facts = tile.group->facts;
  if (!has_owners(facts) || c_.facts.axis_of(facts).size == 1) return seen;
  const auto whole = whole_update(c_.facts, facts);
  const auto add = [&](OpKind kind, OpReason reason, std::int64_t vectors, std::int64_t sent) {
    seen.push_back(c_.observer.issued({.kind = kind,
                                       .reason = reason,
                                       .group = tile.group->index,
                                       .bytes = vectors * facts.layout.numel() * width(Dtype::F32),
                                       .sent = sent * width(Dtype::F32)}));
  };
  if (whole.vectors > 1) add(OpKind::SendToOwners, OpReason::Update, whole.vectors, whole.sent_to_owners);
  add(OpKind::SendFromOwners, OpReason::NewValues, 1 + facts.num_slots(), whole.sent_by_owner);
  return seen;
}

void OptimizerStep::update(const Tile& tile, To to, Slot* slot) {
  auto& group = *tile.group;
  const auto& segment = segment_of(tile);
  const auto& rests = group.states[tile.segment];
  const bool in_file = segment.tier == Tier::File, travels = to == To::Params && segment.param_travels;
  const auto owned = segment.begin + tile.begin;  // in the owned range
  const auto resting = group.params->resting_part(owned, tile.numel);
  if (in_file) slot->reads.wait();
  UpdateTarget target;
  const auto state = [&](int k, const View& rest) {
    return in_file ? part_of(*slot, k, tile, rest.dtype) : part_of(k, rest, tile.begin, tile.numel);
  };
  target.master = state(0, rests.master);
  for (int k = 0; k < group.facts.num_slots(); ++k) target.slots[k] = state(1 + k, rests.slots[k]);
  target.param_elsewhere = travels || to == To::PendingParams;
  if (to == To::PendingParams) {
    target.param = group.pending_params.part(owned, tile.numel);
  } else if (travels) {
    target.param = {slot->param.buffer, 0, tile.numel, group.facts.precision.param};
    zero_gaps(c_, group.facts.layout, c_.facts.owned_begin(group.facts) + owned, target.param);  // updates skip them
  } else if (!segment.aliases_master) {
    target.param = resting;
  }
  for (const auto& [save, call] : before_change) call(group.index, owned, tile.numel, target);
  const auto at = in_file ? Tier::Host : segment.tier;
  const auto bytes = state_bytes(tile);
  if (group.facts.by_rule) target.scratch = scratch_of(tile, at);
  {
    const auto seen = observe(tile, OpKind::Update, OpReason::Update, at, at, bytes);
    const auto exchanges = observe_owners(tile);
    c_.backend.optimizer.update(group.index, owned, tile.numel, target, group.grads->source());
  }
  if (in_file) {
    slot->writes.begin(observe(tile, OpKind::StoreStates, OpReason::Leaves, Tier::Host, Tier::File, bytes));
    for (int k = 0; k <= group.facts.num_slots(); ++k)
      slot->writes.add(
          c_.backend.tensors.write(part_of(k, k == 0 ? rests.master : rests.slots[k - 1], tile.begin, tile.numel),
                                   k == 0 ? target.master : target.slots[k - 1]));
  }
  if (!travels) return;
  auto seen = observe(tile, group.facts.in_file() ? OpKind::Store : OpKind::Copy, OpReason::NewValues, Tier::Host,
                      group.facts.param_tier, target.param.bytes());
  if (!group.facts.in_file()) return c_.backend.tensors.copy(resting, target.param, Lane::Offload);
  slot->param_write.begin(std::move(seen));
  slot->param_write.add(c_.backend.tensors.write(resting, target.param));
}

void OptimizerStep::run(To to, const std::function<void(Group&)>& updated) {
  // One slot is left for the tile after next, so that its write can complete during an update.
  const auto ahead = c_.facts.pipeline_read ? std::max<std::size_t>(slots_.size(), 2) - 1 : 1;
  std::size_t next = 0;
  for (const auto& group : groups_) {
    for (std::size_t s = 0; s < group->facts.segments.size(); ++s) {
      const auto& segment = group->facts.segments[s];
      if (!goes_by_tiles(segment)) {
        if (segment.numel > 0) update({group.get(), s, 0, segment.numel}, to, nullptr);
        continue;
      }
      for (; next < tiles_.size() && tiles_[next].group == group.get() && tiles_[next].segment == s; ++next) {
        read_until(next + ahead);
        update(tiles_[next], to, &slot_of(next));
        if (!c_.facts.pipeline_write) {
          slot_of(next).param_write.wait();
          slot_of(next).writes.wait();
        }
      }
    }
    if (to == To::Params && group->facts.trainable) group->params->mark_updated();
    if (!c_.facts.updates_together) updated(*group);
  }
  c_.backend.optimizer.complete_updates();
  for (const auto& group : groups_)
    if (c_.facts.updates_together) updated(*group);
  for (auto& slot : slots_) slot.param_write.wait();  // parameters are needed next; states only in the next run
  for (auto& scratch : scratch_) c_.memory.give(scratch);
  read_ = 0;
}

void OptimizerStep::settle() {
  for (auto& slot : slots_) {
    slot.reads.wait();
    slot.param_write.wait();
    slot.writes.wait();
  }
  read_ = 0;
}

}  // namespace zero::step
