// See footprint.h.
#include "memory/footprint.h"

#include <algorithm>

#include "config/stage_rules.h"
#include "config/tier_rules.h"

namespace zero::memory {
namespace {

using config::kMasterWidth;
using config::whole_blocks;

std::int64_t on(Tier tier, std::int64_t bytes) { return tier == Tier::File ? whole_blocks(bytes) : bytes; }

// The largest two of a sequence, for a buffer in use and one being filled.
struct Pair {
  std::int64_t first = 0, second = 0;
  void add(std::int64_t value) {
    if (value > first) std::swap(value, first);
    second = std::max(second, value);
  }
  std::int64_t sum() const { return first + second; }
};

}  // namespace

std::int64_t Footprint::total(Tier tier) const {
  std::int64_t sum = 0;
  for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p)
    sum += resting[MemoryReport::index(tier)][p] + passing[MemoryReport::index(tier)][p];
  return sum;
}

Footprint footprint(const FootprintRules& rules, const std::vector<GroupSize>& groups,
                    const std::vector<GroupPlace>& places) {
  Footprint f;
  Pair gathered, reduced, kept_gradients;
  std::int64_t roots_gathered = 0, roots_reduced = 0;
  std::int64_t most_tile = 0, tiles = 0, copy_width = 0, largest_fetch = 0, in_files = 0;
  bool states_in_file = false;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& group = groups[g];
    const auto& place = places[g];
    const bool sharded =
        config::shards_parameters(rules.stage, group.persistent, rules.world, place.parameters != Tier::Device);
    const auto resting = sharded ? group.shard : group.padded;
    const auto tier = sharded ? place.parameters : Tier::Device;
    f.rests(tier, Purpose::Parameters) += on(tier, resting * rules.parameter_width);
    const bool mapped = rules.maps_shards && tier != Tier::File &&
                        static_cast<std::size_t>(resting * rules.parameter_width) >= config::kLeastMappedBytes;
    if (sharded && !mapped) {
      if (rules.second_shards > 0)
        f.rests(Tier::Device, Purpose::Parameters) += group.padded / rules.second_shards * rules.parameter_width;
      const auto whole = group.padded * rules.parameter_width;
      if (group.root)
        roots_gathered += whole;
      else
        gathered.add(whole);
    }
    if (tier == Tier::File) {
      largest_fetch = std::max(largest_fetch, whole_blocks(resting * rules.parameter_width));
      ++in_files;
    }
    if (!group.trainable) continue;

    const auto owned = rules.stage == 0 ? group.padded : group.shard;
    const bool offloaded = place.optimizer != Tier::Device && rules.ratio > 0;
    const bool aliases = rules.parameter_width == kMasterWidth && tier == Tier::Device && !rules.delayed;
    const auto moved = offloaded ? config::moved_numel(owned, rules.ratio) : std::int64_t{0};
    const auto add_states = [&](Tier at, std::int64_t numel) {
      if (numel == 0) return;
      if (at != Tier::Device || !aliases) f.rests(at, Purpose::MasterParameters) += on(at, numel * kMasterWidth);
      f.rests(at, Purpose::OptimizerStates) += rules.num_slots * on(at, numel * kMasterWidth);
    };
    add_states(place.optimizer, moved);
    add_states(Tier::Device, owned - moved);
    const bool travels = moved > 0 && (tier == Tier::File || (tier == Tier::Device && !rules.on_cpu));
    if ((moved > 0 && place.optimizer == Tier::File) || travels || tier == Tier::File) {
      states_in_file |= moved > 0 && place.optimizer == Tier::File;
      if (tier == Tier::File || travels) copy_width = rules.parameter_width;
      const auto numel = std::max(moved, std::int64_t{1});
      most_tile = std::max(most_tile, std::min(rules.tile_numel, numel));
      tiles += (numel + rules.tile_numel - 1) / rules.tile_numel;
    }

    const auto shard_gradient = group.shard * rules.gradient_width;
    if (rules.direct_gradients) {
      f.passes(Tier::Device, Purpose::Gradients) +=
          group.numel * rules.gradient_width + group.members * config::kReadableOverhead;
    } else {
      const bool on_host = offloaded && rules.stage >= 2 && rules.on_cpu;
      f.rests(on_host ? Tier::Host : Tier::Device, Purpose::Gradients) +=
          rules.stage >= 2 ? shard_gradient : group.padded * rules.gradient_width;
      if (on_host && rules.delayed) f.rests(Tier::Host, Purpose::Gradients) += shard_gradient;
    }
    if (offloaded && (rules.direct_gradients || rules.stage < 2 || !rules.on_cpu))
      f.rests(Tier::Host, Purpose::Gradients) += shard_gradient * (rules.delayed ? 2 : 1);
    if (offloaded && rules.delayed) f.rests(Tier::Host, Purpose::Parameters) += owned * rules.parameter_width;

    if (rules.world > 1 || rules.stage >= 2) {
      const auto wire = rules.reads_gradients
                            ? group.numel * rules.wire_width + group.members * config::kReadableOverhead
                            : (group.padded + group.shard) * rules.wire_width;
      if (rules.stage < 2 && (rules.direct_gradients || rules.wire_width == rules.gradient_width)) continue;
      if (group.root)
        roots_reduced += wire;
      else
        reduced.add(wire);
    }
  }
  f.passes(Tier::Device, Purpose::GatherBuffers) += roots_gathered + gathered.sum();
  f.passes(Tier::Device, Purpose::ReduceBuffers) += roots_reduced + reduced.sum();
  if (in_files > 0)
    f.passes(Tier::Host, Purpose::GatherBuffers) +=
        largest_fetch * std::min<std::int64_t>(in_files, 1 + std::max(1, rules.fetch_ahead));
  if (rules.checksums) f.rests(Tier::Host, Purpose::Other) += config::checksum_bytes(f.total(Tier::File));
  const auto slots = std::min(tiles, rules.tiles);
  f.passes(Tier::Host, Purpose::Other) +=
      slots * ((states_in_file ? (1 + rules.num_slots) * whole_blocks(most_tile * kMasterWidth) : 0) +
               (copy_width > 0 ? whole_blocks(most_tile * copy_width) : 0));
  return f;
}

}  // namespace zero::memory
