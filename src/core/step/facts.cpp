// See facts.h.
#include "step/facts.h"

#include <algorithm>

#include "base/kept_memory.h"
#include "config/optimizers.h"
#include "net/transport_choice.h"
#include "step/tiers.h"

namespace zero::step {
namespace {

// Accumulation over several micro-batches loses precision in 16 bits, so it uses fp32 by default.
MixedPrecisionPolicy precision_of(const config::Settings& settings, std::int64_t accumulation) {
  using config::Precision;
  const auto param = settings.precision;
  const bool fp32 = accumulation > 1 && !settings.low_precision_masters();
  return {.param = dtype_of(param),
          .reduce = dtype_of(settings.communication_dtype.value_or(param)),
          .grad = dtype_of(settings.grad_accum_dtype.value_or(fp32 ? Precision::Fp32 : param)),
          .master = dtype_of(settings.low_precision_masters() ? param : Precision::Fp32),
          .slots = slots_of(settings)};
}

bool is_one_dtype(const MixedPrecisionPolicy& p) { return p.grad == p.param && p.reduce == p.param; }

// Peers read gradients in place if gradients are sharded, or if all dtypes are equal.
bool reduces_in_place(const RunFacts& run, const MixedPrecisionPolicy& precision, const Axis& axis) {
  return axis.peer_reads && axis.size > 1 && (run.sharding.grads || is_one_dtype(precision));
}

GradStorageKind grads_of(const RunFacts& run, const MixedPrecisionPolicy& precision, const Axis& axis) {
  const bool in_place = reduces_in_place(run, precision, axis);
  if (in_place && run.sharding.grads) return GradStorageKind::PeerRead;
  const bool nothing_to_do = axis.size == 1 && run.predivide == 1;
  return is_one_dtype(precision) && (in_place || nothing_to_do) ? GradStorageKind::Autograd : GradStorageKind::Flat;
}

std::vector<Segment> segments_of(const RunFacts& run, const GroupFacts& group, Tier tier, bool any_delayed) {
  const auto owned = group.owned();
  const auto moved = tier == Tier::Device ? 0 : step::moved_numel(owned, run.offload_ratio);
  // A delayed update must not modify the parameters that a step reads.
  const bool aliases =
      group.precision.param == group.precision.master && group.param_tier == Tier::Device && !any_delayed;
  std::vector<Segment> all;
  const auto add = [&](Tier at, std::int64_t begin, std::int64_t numel) {
    Segment segment{.tier = at, .begin = begin, .numel = numel, .aliases_master = aliases && at == Tier::Device};
    segment.param_travels =
        !segment.aliases_master &&
        (group.in_file() || (run.topology.gpu && at != Tier::Device && group.param_tier == Tier::Device));
    all.push_back(segment);
  };
  if (moved > 0) add(tier, 0, moved);
  if (moved < owned) add(Tier::Device, moved, owned - moved);
  return all;
}

}  // namespace

Dtype dtype_of(config::Precision precision) {
  switch (precision) {
    case config::Precision::Bf16:
      return Dtype::BF16;
    case config::Precision::Fp16:
      return Dtype::F16;
    case config::Precision::Fp32:
      break;
  }
  return Dtype::F32;
}

Dtype slots_of(const config::Settings& settings) {
  const auto bits = settings.state_bits();
  return bits == 8 ? Dtype::U8 : bits == 16 ? Dtype::BF16 : Dtype::F32;
}

RunFacts run_facts(const config::Settings& settings, const RunTopology& topology, std::int64_t accumulation,
                   std::optional<int> most_states) {
  const auto& zero = settings.zero;
  const auto& optimizer = zero.offload_optimizer;
  RunFacts run;
  run.topology = topology;
  run.sharding = ShardingPolicy::of(settings);
  run.precision = precision_of(settings, accumulation);
  if (settings.optimizer.type == config::OptimizerType::Adagrad)
    run.slot_initial_value = static_cast<float>(settings.optimizer.initial_accumulator_value);
  run.accumulation = accumulation;
  run.boundary_by_count = settings.managed_gradient_accumulation;
  // A mean divides before the reduction (by the number of ranks, or by a factor, against overflow) and by the rest in
  // the update.
  if (settings.reduce_op == config::ReduceOp::Mean) {
    const double world = topology.world, ahead = settings.prescale_gradients ? world : settings.predivide_factor;
    run.predivide = static_cast<float>(1.0 / ahead);
    run.postmultiply = static_cast<float>(ahead / world);
  }
  run.clip = settings.gradient_clipping;
  run.checks_overflow =
      settings.precision != config::Precision::Bf16 || settings.check_grad_overflow || settings.scales_loss();
  bool in_place = false;
  for (auto& axis : run.topology.axes) {
    in_place |= reduces_in_place(run, run.precision, axis);
    // Experts have no secondary shards: neighbouring ranks may have other experts.
    const bool secondary = run.sharding.params && axis.size > 1 && !axis.peer_reads && zero.hpz_ranks > 1 &&
                           &axis == &run.topology.axes.front();
    axis.secondary_ranks = secondary ? zero.hpz_ranks : 0;
  }
  run.overlap_reduce = zero.overlap_comm.value_or(run.sharding.params || in_place);
  run.offload_ratio = optimizer.ratio;
  run.delayed = zero.delayed_update.enabled;
  run.delayed_start = zero.delayed_update.start_step;
  const auto most = zero.sub_group_size;
  run.tile_numel = step::tile_numel(std::min(most, optimizer.buffer_size.value_or(most)), run.precision.slots);
  run.tiles = step::tiles_at_once(optimizer.buffer_count,
                                  most_states.value_or(static_cast<int>(config::states_of(settings.optimizer).size())));
  run.pipeline_read = optimizer.pipeline_read;
  run.pipeline_write = optimizer.pipeline_write;
  run.checksums = settings.aio.checksums;
  run.prefetch_numel = zero.prefetch_bucket_size;
  run.max_live_numel = zero.max_live_parameters;
  run.max_reuse_numel = zero.max_reuse_distance;
  run.allgather_numel = zero.allgather_bucket_size;
  run.keeps_snapshots = settings.checkpoint.keep_every > 0;
  run.fetch_ahead = step::shards_fetched_ahead(zero.offload_param.buffer_count);
  return run;
}

std::int64_t kept_bytes(const RunFacts& run, const std::vector<GroupFacts>& groups) {
  if (!run.keeps_snapshots) return 0;
  std::int64_t bytes = 0;
  for (const auto& group : groups)
    bytes += group.trainable ? group.saved_bytes(group.owned()) : group.resting() * width(group.precision.param);
  return base::kKeptSlots * bytes;
}

std::vector<GroupFacts> group_facts(const RunFacts& run, const config::Settings& settings,
                                    const std::vector<Unit>& units, const std::vector<Placement>& placements) {
  const auto& zero = settings.zero;
  const bool any_offloaded =
      run.offload_ratio > 0 &&
      std::any_of(placements.begin(), placements.end(), [](const Placement& p) { return p.optimizer != Tier::Device; });
  const bool any_delayed = run.delayed && any_offloaded;
  std::vector<GroupFacts> groups;
  for (std::size_t u = 0; u < units.size(); ++u) {
    const auto& unit = units[u];
    const auto& axis = run.topology.axes[static_cast<std::size_t>(unit.axis)];
    auto& group = groups.emplace_back();
    group.name = unit.name;
    group.root = unit.root;
    group.module = unit.module;
    group.trainable = unit.trainable;
    group.persistent = unit.persistent;
    group.layout = unit.layout;
    group.axis = unit.axis;
    group.states = unit.states;
    group.by_rule = unit.by_rule;
    group.owners = unit.owners;
    group.precision = run.precision_of(unit.fp32);
    if (run.topology.tensor_rank > 0 && unit.replicated > 0)
      group.counted_begin = unit.replicated == unit.layout.num_parameters()
                                ? unit.padded_numel()
                                : unit.layout.parameter_offset(unit.replicated);
    group.sharding = run.sharding;
    // A single rank does not shard, but may offload its parameters.
    group.sharding.params =
        run.sharding.params && !unit.persistent && (axis.size > 1 || placements[u].params != Tier::Device);
    group.param_tier = group.sharding.params ? placements[u].params : Tier::Device;
    group.symmetric = group.sharding.params && axis.peer_reads && axis.size > 1 && group.param_tier != Tier::File &&
                      group.shard() * width(group.precision.param) >= static_cast<std::int64_t>(net::kLeastMappedBytes);
    // Parameters that stay fp32 are sent as they are.
    if (axis.quantizes && axis.size > 1 && run.sharding.params && !unit.fp32) {
      const bool trained = zero.quantized_weights, frozen = trained || zero.quantized_nontrainable_weights;
      group.unshard_bits = (unit.trainable ? trained : frozen) ? 8 : 0;
      group.reduce_bits = zero.quantized_gradients ? 4 : 0;
    }
    if (!unit.trainable) continue;
    group.grads = grads_of(run, group.precision, axis);
    const auto tier = run.offload_ratio > 0 ? placements[u].optimizer : Tier::Device;
    const bool offloaded = tier != Tier::Device;
    // On a CPU a reduced shard is written directly to where the update reads it.
    group.grads_on_host =
        offloaded && run.sharding.grads && !run.topology.gpu && group.grads != GradStorageKind::Autograd;
    group.grads_copied = offloaded && !group.grads_on_host;
    group.delayed = any_delayed;
    group.segments = segments_of(run, group, tier, any_delayed);
  }
  return groups;
}

}  // namespace zero::step
