// See optimizer_step.h.
#include "step/optimizer_step.h"

#include <algorithm>
#include <utility>

#include "step/tiers.h"

namespace zero::step {
namespace {

// Bytes of masters and optimizer states of one element.
std::int64_t state_width(const RunFacts& run) { return (1 + run.num_slots) * step::kMasterWidth; }

bool goes_by_tiles(const Segment& segment) { return segment.tier == Tier::File || segment.param_travels; }

void wait_all(std::vector<WorkPtr>& works) {
  for (auto& work : works) work->wait();
  works.clear();
}

void wait_for(WorkPtr& work) {
  if (work) std::exchange(work, nullptr)->wait();
}

// Makes `fill` write to where a range rests; to a file by way of a buffer, part by part.
void write_resting(const Context& c, Tier tier, View to, const std::function<void(View, std::int64_t begin)>& fill) {
  if (tier != Tier::File) return fill(to, 0);
  for (std::int64_t begin = 0; begin < to.numel; begin += c.facts.tile_numel) {
    const auto numel = std::min(c.facts.tile_numel, to.numel - begin);
    auto buffer = c.memory.take_io(numel, to.dtype);
    fill(buffer, begin);
    c.backend.tensors.write(to.part(begin, numel), buffer)->wait();
    c.memory.give_io(buffer);
  }
}

}  // namespace

// --- a group ----------------------------------------------------------------------------------

Group::Group(const Context& c, const GroupFacts& facts, int index)
    : facts(facts),
      index(index),
      params(ParamStorage::make(c, facts, index)),
      grads(GradStorage::make(c, facts, index)) {
  for (const auto& segment : facts.segments) {
    const auto rest = [&](Purpose purpose, Role role) {
      return c.memory.rest(
          {.place = c.place_of(segment.tier), .tier = segment.tier, .purpose = purpose, .role = role, .group = index},
          segment.numel, Dtype::F32);
    };
    auto& target = states.emplace_back();
    target.master = segment.aliases_master ? params->resting_part(segment.begin, segment.numel)
                                           : rest(Purpose::MasterParameters, Role::Master);
    for (int k = 0; k < c.facts.num_slots; ++k) target.slots[k] = rest(Purpose::OptimizerStates, Role::OptimizerState);
  }
  if (facts.delayed)
    pending_params = c.memory.rest({.place = c.host(),
                                    .tier = Tier::Host,
                                    .purpose = Purpose::Parameters,
                                    .role = Role::PendingParams,
                                    .group = index},
                                   facts.owned(), c.facts.precision.param);
}

void Group::initialise(const Context& c, View values) {
  const auto write = [&](OpKind kind, Tier tier, View to, View from) {
    if (tier == Tier::File)
      c.observer.issued({.kind = kind,
                         .reason = OpReason::InitialValues,
                         .group = index,
                         .bytes = to.bytes(),
                         .from = Tier::Host,
                         .to = Tier::File});
    write_resting(c, tier, to, [&](View part, std::int64_t begin) {
      c.backend.tensors.copy(part, from.part(begin, part.numel), Lane::Compute);
    });
  };
  const auto shard_begin = c.facts.axis_of(facts).rank * facts.shard();
  const auto& resting = params->resting();
  write(OpKind::Store, facts.param_tier, resting, values.part(facts.sharding.params ? shard_begin : 0, resting.numel));
  const auto owned_begin = facts.sharding.optimizer ? shard_begin : 0;
  for (std::size_t s = 0; s < states.size(); ++s) {
    const auto& segment = facts.segments[s];
    if (!segment.aliases_master)
      write(OpKind::StoreStates, segment.tier, states[s].master,
            values.part(owned_begin + segment.begin, segment.numel));
    const auto first = c.facts.slot_initial_value;
    if (segment.tier == Tier::File && first == 0) continue;  // files read as zeros
    for (int k = 0; k < c.facts.num_slots; ++k)
      write_resting(c, segment.tier, states[s].slots[k],
                    [&](View part, std::int64_t) { c.backend.tensors.fill(part, first); });
  }
  params->mark_updated();
}

// --- the step ---------------------------------------------------------------------------------

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
  make_slots(most, std::min(count, c_.facts.tiles));
}

void OptimizerStep::make_slots(std::int64_t numel, std::int64_t count) {
  bool states_in_file = false, params_in_file = false, params_travel = false;
  for (const auto& tile : tiles_) {
    states_in_file |= segment_of(tile).tier == Tier::File;
    params_travel |= segment_of(tile).param_travels;
    params_in_file |= segment_of(tile).param_travels && tile.group->facts.in_file();
  }
  const auto rest = [&](Place place, Dtype dtype) {
    return c_.memory.rest({.place = place, .tier = Tier::Host, .purpose = Purpose::Other}, numel, dtype);
  };
  slots_.resize(static_cast<std::size_t>(count));
  for (auto& slot : slots_) {
    for (int state = 0; states_in_file && state <= c_.facts.num_slots; ++state)
      slot.states[state] = rest(Place::IoBuffer, Dtype::F32);
    if (params_travel)
      slot.param = rest(params_in_file ? Place::IoBuffer : Place::PinnedHost, c_.facts.precision.param);
  }
}

void OptimizerStep::observe(const Tile& tile, OpKind kind, OpReason reason, Tier from, Tier to, std::int64_t bytes) {
  c_.observer.issued({.kind = kind,
                      .reason = reason,
                      .group = tile.group->index,
                      .bytes = bytes,
                      .from = from,
                      .to = to,
                      .offloaded_numel = segment_of(tile).tier != Tier::Device ? tile.numel : 0});
}

void OptimizerStep::read_until(std::size_t end) {
  for (; read_ < std::min(end, tiles_.size()); ++read_) {
    auto& slot = slot_of(read_);
    wait_all(slot.writes);
    wait_for(slot.param_write);
    const auto& tile = tiles_[read_];
    if (segment_of(tile).tier != Tier::File) continue;
    observe(tile, OpKind::FetchStates, OpReason::Arrives, Tier::File, Tier::Host, tile.numel * state_width(c_.facts));
    const auto& rests = tile.group->states[tile.segment];
    for (int k = 0; k <= c_.facts.num_slots; ++k) {
      const auto& from = k == 0 ? rests.master : rests.slots[k - 1];
      slot.reads.push_back(
          c_.backend.tensors.read(slot.states[k].part(0, tile.numel), from.part(tile.begin, tile.numel)));
    }
  }
}

void OptimizerStep::read_ahead(std::size_t done, std::size_t all) {
  if (c_.facts.pipeline_read) read_until(slots_.size() * done / all);
}

void OptimizerStep::update(const Tile& tile, float factor, To to, Slot* slot) {
  auto& group = *tile.group;
  const auto& segment = segment_of(tile);
  const auto& rests = group.states[tile.segment];
  const bool in_file = segment.tier == Tier::File, travels = to == To::Params && segment.param_travels;
  const auto owned = segment.begin + tile.begin;  // in the owned range
  const auto resting = group.params->resting_part(owned, tile.numel);
  if (in_file) wait_all(slot->reads);
  UpdateTarget target;
  target.master = in_file ? slot->states[0].part(0, tile.numel) : rests.master.part(tile.begin, tile.numel);
  for (int k = 0; k < c_.facts.num_slots; ++k)
    target.slots[k] = in_file ? slot->states[1 + k].part(0, tile.numel) : rests.slots[k].part(tile.begin, tile.numel);
  if (to == To::PendingParams) {
    target.param = group.pending_params.part(owned, tile.numel);
  } else if (travels) {
    target.param = slot->param.part(0, tile.numel);
    c_.backend.tensors.fill(target.param, 0);  // padding is in no update, and must rest as zeros
  } else if (!segment.aliases_master) {
    target.param = resting;
  }
  if (before_change) before_change(group.index, owned, tile.numel, target);
  const auto at = in_file ? Tier::Host : segment.tier;
  const auto bytes = tile.numel * state_width(c_.facts);
  observe(tile, OpKind::Update, OpReason::Update, at, at, bytes);
  c_.backend.optimizer.update(group.index, owned, tile.numel, target, group.grads->source(), factor);
  if (in_file) {
    observe(tile, OpKind::StoreStates, OpReason::Leaves, Tier::Host, Tier::File, bytes);
    for (int k = 0; k <= c_.facts.num_slots; ++k)
      slot->writes.push_back(
          c_.backend.tensors.write((k == 0 ? rests.master : rests.slots[k - 1]).part(tile.begin, tile.numel),
                                   k == 0 ? target.master : target.slots[k - 1]));
  }
  if (!travels) return;
  observe(tile, group.facts.in_file() ? OpKind::Store : OpKind::Copy, OpReason::NewValues, Tier::Host,
          group.facts.param_tier, target.param.bytes());
  if (group.facts.in_file())
    slot->param_write = c_.backend.tensors.write(resting, target.param);
  else
    c_.backend.tensors.copy(resting, target.param, Lane::Offload);
}

void OptimizerStep::run(float factor, To to, const std::function<void(Group&)>& updated) {
  // One slot is left for the tile after next, so that its write has an update's time to end.
  const auto ahead = c_.facts.pipeline_read ? std::max<std::size_t>(slots_.size(), 2) - 1 : 1;
  std::size_t next = 0;
  for (const auto& group : groups_) {
    for (std::size_t s = 0; s < group->facts.segments.size(); ++s) {
      const auto& segment = group->facts.segments[s];
      if (!goes_by_tiles(segment)) {
        if (segment.numel > 0) update({group.get(), s, 0, segment.numel}, factor, to, nullptr);
        continue;
      }
      for (; next < tiles_.size() && tiles_[next].group == group.get() && tiles_[next].segment == s; ++next) {
        read_until(next + ahead);
        update(tiles_[next], factor, to, &slot_of(next));
        if (!c_.facts.pipeline_write) {
          wait_all(slot_of(next).writes);
          wait_for(slot_of(next).param_write);
        }
      }
    }
    if (to == To::Params && group->facts.trainable) group->params->mark_updated();
    updated(*group);
  }
  for (auto& slot : slots_) wait_for(slot.param_write);  // parameters are needed next, states not before the next run
  read_ = 0;
}

void OptimizerStep::settle() {
  for (auto& slot : slots_) {
    wait_all(slot.reads);
    wait_all(slot.writes);
    wait_for(slot.param_write);
  }
  read_ = 0;
}

}  // namespace zero::step
