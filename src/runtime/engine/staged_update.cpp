// See staged_update.h.
#include "engine/staged_update.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "step/tiers.h"
#include "torch_hooks/allocation_observer.h"

namespace zero::engine {
namespace {

// The compute copy that the update writes is not where it rests.
bool parameters_travel(const ParamGroup& group, const GroupStates::Segment& segment) {
  if (segment.aliases_master) return false;
  const auto& parameters = group.parameters();
  return parameters.in_file() || (segment.tier != step::Tier::Device && !parameters.vector().is_cpu());
}

}  // namespace

// Host memory of one tile, and the transfers that it is part of.
struct StagedUpdate::Slot {
  storage::IoBuffer states[GroupStates::kMostStates], copy;  // of what rests in files
  at::Tensor pinned_copy;                                    // of what travels to a GPU
  std::shared_ptr<Work> fetches[GroupStates::kMostStates];
  std::vector<std::shared_ptr<Work>> stores;  // of states
  std::shared_ptr<Work> parameters_store;
  gpu::Mark copied;
  observe::TraceOperation fetch_trace, states_trace, parameters_trace;
  const Tile *storing = nullptr, *storing_parameters = nullptr;
  step::MemoryLedger* ledger = nullptr;
  std::int64_t bytes = 0;  // booked

  ~Slot() {
    if (ledger != nullptr) ledger->book(step::Tier::Host, step::Purpose::Other, -bytes);
  }
};

std::int64_t StagedUpdate::tile_for(std::int64_t limit) { return step::tile_numel(limit); }

StagedUpdate::StagedUpdate(std::vector<ParamGroup*> groups, const Policy& policy, step::MemoryLedger& ledger,
                           observe::Trace& trace)
    : groups_(std::move(groups)), policy_(policy), trace_(trace) {
  int most_states = 0;
  std::int64_t most_copy = 0, most_numel = 0;
  engine::ShardFile *states_file = nullptr, *copy_file = nullptr;
  for (auto* group : groups_) {
    if (!group->trainable()) continue;
    for (const auto& segment : group->states().segments()) {
      const bool travels = parameters_travel(*group, segment);
      if (!segment.in_file() && !travels) continue;
      for (std::int64_t begin = 0; begin < segment.numel; begin += policy_.tile_numel)
        tiles_.push_back({group, &segment, begin, std::min(policy_.tile_numel, segment.numel - begin)});
      most_numel = std::max(most_numel, std::min(policy_.tile_numel, segment.numel));
      if (segment.in_file()) {
        most_states = group->states().num_states();
        states_file = &segment.stores[GroupStates::kMaster].shard_file();
      }
      if (travels) {
        most_copy = static_cast<std::int64_t>(at::elementSize(group->parameters().dtype()));
        if (group->parameters().in_file()) copy_file = &group->parameters().shard_file();
      }
    }
  }
  if (tiles_.empty()) return;
  torch_hooks::AllocationObserver::Pause pause;
  const auto count = std::min<std::size_t>(tiles_.size(), static_cast<std::size_t>(policy_.tiles));
  for (std::size_t i = 0; i < count; ++i) {
    auto slot = std::make_unique<Slot>();
    const auto buffer = [&](engine::ShardFile& file, std::int64_t width) {
      constexpr auto kAlignment = engine::ShardFile::kAlignment;
      auto made = file.file().buffer((most_numel * width + kAlignment - 1) / kAlignment * kAlignment);
      slot->bytes += made.bytes();
      return made;
    };
    if (states_file != nullptr)
      for (int state = 0; state < most_states; ++state) slot->states[state] = buffer(*states_file, sizeof(float));
    if (copy_file != nullptr) slot->copy = buffer(*copy_file, most_copy);
    if (most_copy > 0 && copy_file == nullptr) {
      slot->pinned_copy = at::empty({most_numel * most_copy}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
      slot->bytes += slot->pinned_copy.numel();
    }
    ledger.book(step::Tier::Host, step::Purpose::Other, slot->bytes);
    slot->ledger = &ledger;
    slots_.push_back(std::move(slot));
  }
}

StagedUpdate::~StagedUpdate() {
  for (auto& slot : slots_) {
    // Nobody may write into memory that is gone: after an error transfers can be under way.
    for (auto& work : slot->fetches)
      if (work) try {
          work->wait();
        } catch (const std::exception&) {
        }
    slot->stores.push_back(slot->parameters_store);
    for (auto& work : slot->stores)
      if (work) try {
          work->wait();
        } catch (const std::exception&) {
        }
  }
}

void StagedUpdate::begin_fetch(Slot& slot, const Tile& tile) {
  if (!tile.segment->in_file()) return;
  slot.fetch_trace.begin(trace_, observe::TraceKind::FetchStates);
  for (int state = 0; state < tile.group->states().num_states(); ++state)
    slot.fetches[state] = tile.segment->stores[state].begin_read(tile.begin, tile.numel, slot.states[state].data());
}

void StagedUpdate::update(Slot& slot, const Tile& tile, optim::ShardedOptimizer& optimizer, float factor, To to) {
  auto& group = *tile.group;
  const int num_states = group.states().num_states();
  const auto bytes = tile.numel * num_states * static_cast<std::int64_t>(sizeof(float));
  ParamGroup::UpdatePlace place{};
  float* vectors[GroupStates::kMostStates] = {};
  if (tile.segment->in_file()) {
    observe::TraceSpan wait(trace_, observe::TraceKind::FetchWait, group.name());
    for (int state = 0; state < num_states; ++state) {
      slot.fetches[state]->wait();
      slot.fetches[state].reset();
      vectors[state] = static_cast<float*>(slot.states[state].data());
    }
    slot.fetch_trace.end(group.name(), bytes);
  } else {
    for (int state = 0; state < num_states; ++state)
      vectors[state] = tile.segment->stores[state].vector().data_ptr<float>() + tile.begin;
  }
  const bool travels = to == To::Parameters && parameters_travel(group, *tile.segment);
  const auto owned_begin = tile.segment->begin + tile.begin;  // in the owned range
  const auto copy_begin = group.parameters_begin() + owned_begin;
  place.travels = travels || to == To::NextParameters;
  place.master = vectors[GroupStates::kMaster];
  std::copy(vectors + 1, vectors + num_states, place.slots);
  if (to == To::NextParameters) {
    place.parameter = group.next_parameters(owned_begin);
  } else if (travels) {
    place.parameter = group.parameters().in_file() ? slot.copy.data() : slot.pinned_copy.mutable_data_ptr();
    // Padding is in no run of the update, and must rest as zeros.
    std::memset(place.parameter, 0, static_cast<std::size_t>(tile.numel) * at::elementSize(group.parameters().dtype()));
  } else if (!tile.segment->aliases_master) {
    place.parameter = group.parameters().vector().narrow(0, copy_begin, tile.numel).mutable_data_ptr();
  }
  {
    observe::TraceSpan span(trace_, observe::TraceKind::Update, group.name(), bytes);
    group.update(optimizer, factor, owned_begin, tile.numel, place);
  }
  if (tile.segment->in_file()) {
    slot.storing = &tile;
    slot.states_trace.begin(trace_, observe::TraceKind::StoreStates);
    for (int state = 0; state < num_states; ++state)
      slot.stores.push_back(tile.segment->stores[state].begin_write(tile.begin, tile.numel, vectors[state]));
  }
  if (!travels) return;
  if (group.parameters().in_file()) {
    slot.storing_parameters = &tile;
    slot.parameters_trace.begin(trace_, observe::TraceKind::Store);
    slot.parameters_store = group.parameters().begin_write(copy_begin, tile.numel, place.parameter);
    return;
  }
  const auto& resting = group.parameters().vector();
  observe::TraceSpan copy(trace_, observe::TraceKind::Copy, group.name(),
                          tile.numel * static_cast<std::int64_t>(resting.element_size()));
  resting.narrow(0, copy_begin, tile.numel)
      .copy_(slot.pinned_copy.narrow(0, 0, tile.numel * static_cast<std::int64_t>(resting.element_size()))
                 .view(resting.scalar_type()),
             /*non_blocking=*/true);
  slot.copied.set(resting.device());
}

void StagedUpdate::finish_parameters(Slot& slot) {
  slot.copied.wait();
  if (slot.storing_parameters == nullptr) return;
  const auto& tile = *slot.storing_parameters;
  {
    observe::TraceSpan wait(trace_, observe::TraceKind::StoreWait, tile.group->name());
    slot.parameters_store->wait();
  }
  slot.parameters_store.reset();
  slot.parameters_trace.end(tile.group->name(),
                            tile.numel * static_cast<std::int64_t>(at::elementSize(tile.group->parameters().dtype())));
  slot.storing_parameters = nullptr;
}

void StagedUpdate::finish_store(Slot& slot) {
  finish_parameters(slot);
  if (slot.storing == nullptr) return;
  const auto& tile = *slot.storing;
  const auto& name = tile.group->name();
  {
    observe::TraceSpan wait(trace_, observe::TraceKind::StoreWait, name);
    for (auto& work : slot.stores) work->wait();
  }
  slot.stores.clear();
  slot.states_trace.end(name,
                        tile.numel * tile.group->states().num_states() * static_cast<std::int64_t>(sizeof(float)));
  slot.storing = nullptr;
}

void StagedUpdate::fetch_until(std::size_t end) {
  for (; fetched_ < std::min(end, tiles_.size()); ++fetched_) {
    finish_store(slot_of(fetched_));
    begin_fetch(slot_of(fetched_), tiles_[fetched_]);
  }
}

void StagedUpdate::read_ahead(std::size_t done, std::size_t all) {
  if (policy_.read_ahead) fetch_until(slots_.size() * done / all);
}

void StagedUpdate::settle() {
  for (auto& slot : slots_) {
    finish_store(*slot);
    for (auto& fetch : slot->fetches)
      if (fetch) std::exchange(fetch, nullptr)->wait();
  }
  fetched_ = 0;
}

void StagedUpdate::run(optim::ShardedOptimizer& optimizer, float factor, To to,
                       const std::function<void(ParamGroup&)>& updated) {
  std::size_t next = 0;  // of the tiles
  for (auto* group : groups_) {
    if (group->trainable()) {
      for (const auto& segment : group->states().segments()) {
        if (next == tiles_.size() || tiles_[next].segment != &segment) {
          if (segment.numel > 0) group->update(optimizer, factor, segment, to == To::NextParameters);
          continue;
        }
        for (; next < tiles_.size() && tiles_[next].segment == &segment; ++next) {
          // The oldest tile's slot is left for the one after next, so that its store has an update's time to end.
          const auto ahead = policy_.read_ahead ? std::max<std::size_t>(slots_.size() - 1, 1) : 1;
          fetch_until(next + ahead);
          update(slot_of(next), tiles_[next], optimizer, factor, to);
          if (!policy_.write_behind) finish_store(slot_of(next));
        }
      }
      if (to == To::Parameters) group->tell_changed();
    }
    updated(*group);
  }
  // Parameters are needed next; states not before the next run, which finds them at rest or waits.
  for (auto& slot : slots_) finish_parameters(*slot);
  fetched_ = 0;
}

}  // namespace zero::engine
