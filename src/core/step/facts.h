// Properties of a run that are known before its first step, as plain values. They are derived once from configuration,
// topology and placement, and used by the engine, the planner and the budgets. Only this file and facts.cpp depend on
// ZeRO stages and configuration keys.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <zero/memory_report.h>

#include "config/settings.h"
#include "sharding/shard_layout.h"
#include "step/precision.h"

namespace zero::step {

using Tier = MemoryReport::Tier;
using Purpose = MemoryReport::Purpose;
inline constexpr Tier kTiers[] = {Tier::Device, Tier::Host, Tier::File};

inline constexpr int kMaxSlots = 8;  // optimizer states per element besides the master
inline constexpr int kDivided = -1;  // in place of an owner

// Which states each rank of an axis keeps 1/size of (ZeRO, arXiv:1910.02054): stage 1 shards optimizer states, stage 2
// also gradients, stage 3 also parameters. States that are not sharded are replicated.
struct ShardingPolicy {
  bool optimizer = false, grads = false, params = false;
  static ShardingPolicy of_stage(int stage) { return {stage >= 1, stage >= 2, stage >= 3}; }
  static ShardingPolicy of(const config::Settings& settings) { return of_stage(settings.zero.stage); }
};

// The ranks that shard one kind of parameter. A dense model has one axis, "dp". Sequence parallelism enlarges it;
// experts have their own. A group of parameters belongs to one axis.
struct Axis {
  std::string name = "dp";
  int size = 1, rank = 0;
  bool peer_reads = false;  // processes of one host, which map each other's memory
  bool quantizes = false;   // a network is involved, so quantization saves bytes (ZeRO++, arXiv:2306.10209)
  int secondary_ranks = 0;  // hpZ: consecutive ranks that share a secondary shard; 0: none. Set by run_facts()
};

struct RunTopology {
  std::vector<Axis> axes{Axis{}};
  int world = 1;        // ranks over which losses are averaged; tensor-parallel ranks repeat a loss
  int tensor_rank = 0;  // coordinate in the tensor-parallel group
  bool gpu = false;
  bool deferred_init = true;  // every rank computes the initial values itself; none are sent
};

// One unit of parameters (a module, or a part of one) that is unsharded and reduced as a whole. Not placed yet.
struct Unit {
  std::string name;  // as in traces and messages: "root", "blocks.0", ...
  bool root = false, trainable = true;
  int module = -1;                      // as in sharding::Unit
  bool persistent = false;              // its parameters are never sharded
  bool fp32 = false;                    // they stay fp32 in a run in 16 bits (libzero.keep_fp32)
  std::vector<std::size_t> parameters;  // indices into the model's parameters, in the order of `layout`
  sharding::ShardLayout layout;         // of its flat vector over the ranks of the axis
  int axis = 0;                         // index into RunTopology::axes
  std::size_t replicated = 0;       // its first parameters, which every tensor-parallel rank has; the others are parts
  std::vector<std::string> states;  // names of the optimizer states per element besides the master, up to kMaxSlots
  // An UpdateRule updates it, from fp32 gradients; by parameter the rank of the axis that has it whole for the update,
  // its owner, or kDivided.
  bool by_rule = false;
  std::vector<int> owners;

  std::int64_t numel() const { return layout.numel(); }
  std::int64_t padded_numel() const { return layout.padded_numel(); }
  std::int64_t shard_numel() const { return layout.shard_numel(); }
};

// The tiers of one unit's states.
struct Placement {
  Tier params = Tier::Device, optimizer = Tier::Device;
  auto operator<=>(const Placement&) const = default;
};

// Where a group's gradients are stored between their arrival and the update.
enum class GradStorageKind {
  Autograd,  // in the parameters' own .grad, without a copy
  Flat,      // copied into one vector per group, which collectives reduce
  PeerRead,  // in memory that peers read, until each rank has summed its shard
};

// A part of a group's masters and optimizer states, on one tier.
struct Segment {
  Tier tier = Tier::Device;
  std::int64_t begin = 0, numel = 0;  // elements within the range whose optimizer states this rank owns
  bool aliases_master = false;        // the stored parameter is the master
  bool param_travels = false;         // the update cannot write the stored parameter directly: uses a host buffer
};

struct GroupFacts {
  std::string name;
  bool root = false, trainable = true, persistent = false;
  int module = -1;  // as in sharding::Unit
  sharding::ShardLayout layout{{0}, 1, 1};
  int axis = 0;
  MixedPrecisionPolicy precision;
  std::int64_t counted_begin = 0;  // elements before it are counted in the norm by another tensor-parallel rank
  ShardingPolicy sharding;         // params is false for persistent units, and for one rank without offload
  Tier param_tier = Tier::Device;  // of the stored parameters
  bool symmetric = false;          // peers read the stored shards in place; unsharding moves no data
  int unshard_bits = 0;            // parameters are all-gathered as integers of this size (qwZ); 0: not quantized
  int reduce_bits = 0;             // gradients are reduced as integers of this size (qgZ); 0: exact
  GradStorageKind grads = GradStorageKind::Flat;
  bool grads_on_host = false;       // reductions end in host memory, where the update reads them
  bool grads_copied = false;        // the reduced shard is copied to host memory
  bool delayed = false;             // updates run in the background: second gradient buffer, pending parameters
  std::vector<Segment> segments;    // empty: frozen
  std::vector<std::string> states;  // as in Unit
  bool by_rule = false;
  std::vector<int> owners;

  int num_slots() const { return static_cast<int>(states.size()); }
  int num_members() const { return static_cast<int>(layout.num_parameters()); }
  std::int64_t padded() const { return layout.padded_numel(); }
  std::int64_t shard() const { return layout.shard_numel(); }
  // Elements whose optimizer states, and whose parameters, this rank stores.
  std::int64_t owned() const { return sharding.optimizer ? shard() : padded(); }
  std::int64_t resting() const { return sharding.params ? shard() : padded(); }
  bool in_file() const { return sharding.params && param_tier == Tier::File; }
  // Bytes of the masters and optimizer states of `numel` elements, which are whole blocks of 8-bit states or end a
  // range.
  std::int64_t state_bytes(std::int64_t numel) const {
    return numel * width(precision.master) + num_slots() * slot_numel(precision.slots, numel) * width(precision.slots);
  }
  // The same in a snapshot or a checkpoint, where states in blocks are fp32.
  std::int64_t saved_bytes(std::int64_t numel) const {
    const auto slot = precision.slots == Dtype::U8 ? Dtype::F32 : precision.slots;
    return numel * (width(precision.master) + num_slots() * width(slot));
  }
};

struct RunFacts {
  RunTopology topology;
  ShardingPolicy sharding;
  MixedPrecisionPolicy precision;  // of activations, and of groups whose parameters do not stay fp32
  float slot_initial_value = 0;    // of optimizer states
  std::int64_t accumulation = 1;
  bool boundary_by_count = true;           // a step every `accumulation` micro-batches; false: when step() is called
  float predivide = 1, postmultiply = 1;   // gradients are multiplied before the reduction; in the update
  double clip = 0;                         // maximum norm; 0: no clipping
  bool checks_overflow = true;             // non-finite gradients skip the update
  bool overlap_reduce = true;              // reductions overlap with backward
  double offload_ratio = 1;                // fraction of a group's optimizer states on its placement's tier
  bool delayed = false;                    // from delayed_start on, updates of offloaded states run in the background
  std::int64_t delayed_start = 0;          // step
  std::int64_t tile_numel = 1, tiles = 1;  // of the update of states in files: elements per tile; tiles in memory
  bool pipeline_read = true, pipeline_write = true;
  bool checksums = false;                                                    // of files, in host memory
  std::int64_t prefetch_numel = 0, max_live_numel = 0, max_reuse_numel = 0;  // of unsharding, see step/prefetcher.h
  std::int64_t allgather_numel = 0;  // limit of concurrent all-gathers of updated parameters
  int fetch_ahead = 0;               // shards fetched from a file beyond the group that is unsharded ahead
  bool keeps_snapshots = false;      // two snapshots of all that a rank stores are in host memory
  bool updates_together = false;     // of all groups before the first all-gather: a GPU
  bool whole_segments = false;       // a dry run that only counts bytes need not split segments into tiles

  MixedPrecisionPolicy precision_of(bool fp32) const { return fp32 ? MixedPrecisionPolicy{} : precision; }
  const Axis& axis_of(const GroupFacts& group) const { return topology.axes[static_cast<std::size_t>(group.axis)]; }
  // Elements of a group's flat vector before this rank's shard; before the range whose optimizer states it owns.
  std::int64_t shard_begin(const GroupFacts& group) const { return axis_of(group).rank * group.shard(); }
  std::int64_t owned_begin(const GroupFacts& group) const { return group.sharding.optimizer ? shard_begin(group) : 0; }
  // Each rank sums its shard directly from its peers' gradients, without a collective on a flat vector.
  bool peer_reduces(const GroupFacts& group) const {
    return group.grads == GradStorageKind::PeerRead ||
           (group.grads == GradStorageKind::Autograd && axis_of(group).size > 1);
  }
};

// `accumulation`: micro-batches per step. `topology` needs no secondary_ranks. most_states: of a parameter, by the
// program's update rule; unset: of the configuration's optimizer.
RunFacts run_facts(const config::Settings& settings, const RunTopology& topology, std::int64_t accumulation,
                   std::optional<int> most_states = std::nullopt);

// Bytes of the snapshots that a rank keeps, without buffers and headers; 0 if it keeps none.
std::int64_t kept_bytes(const RunFacts& run, const std::vector<GroupFacts>& groups);

// One result per unit. `placements`: one per unit, from step/placement.h.
std::vector<GroupFacts> group_facts(const RunFacts& run, const config::Settings& settings,
                                    const std::vector<Unit>& units, const std::vector<Placement>& placements);

// Bytes that one rank sends in a ring collective over a vector of `bytes` bytes.
constexpr std::int64_t ring_bytes(std::int64_t bytes, int ranks) { return (ranks - 1) * bytes / ranks; }

// The order in which gradients are reduced, as indices: trainable units from last to first, then root units, which
// backward reaches last.
template <class Units>
std::vector<std::size_t> reduce_order(const Units& units) {
  std::vector<std::size_t> order;
  for (std::size_t i = units.size(); i-- > 0;)
    if (units[i].trainable && !units[i].root) order.push_back(i);
  for (std::size_t i = 0; i < units.size(); ++i)
    if (units[i].trainable && units[i].root) order.push_back(i);
  return order;
}

}  // namespace zero::step
