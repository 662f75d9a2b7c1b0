// See rank_rules.h.
#include "plan/rank_rules.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "config/stage_rules.h"
#include "config/tier_rules.h"

namespace zero::planning {
namespace {

using config::OffloadDevice;

int slots_of(const config::OptimizerSettings& optimizer) {
  using config::OptimizerType;
  switch (optimizer.type) {
    case OptimizerType::None:
    case OptimizerType::Adam:
    case OptimizerType::AdamW:
      return 2;
    case OptimizerType::Sgd:
      return optimizer.momentum != 0 ? 1 : 0;
    case OptimizerType::Adagrad:
    case OptimizerType::Lion:
      break;
  }
  return 1;
}

// What the configuration's offload blocks say, as engine/tier_plan.h.
std::vector<memory::GroupPlace> configured_places(const RankRules& rules, const std::vector<Unit>& units) {
  const auto& zero = rules.settings.zero;
  const auto& optimizer = zero.offload_optimizer;
  const auto& param = zero.offload_param;
  std::vector<memory::GroupPlace> places;
  std::int64_t in_host = 0;  // elements of parameters
  for (const auto& unit : units) {
    auto& place = places.emplace_back();
    if (zero.stage >= 1 && optimizer.device != OffloadDevice::None)
      place.optimizer = optimizer.device == OffloadDevice::Nvme ? Tier::File : Tier::Host;
    if (zero.stage < 3 || unit.persistent || param.device == OffloadDevice::None) continue;
    const auto shard = (unit.numel() + rules.around.world - 1) / rules.around.world;
    const bool in_file = param.device == OffloadDevice::Nvme && in_host + shard > param.max_in_cpu;
    place.parameters = in_file ? Tier::File : Tier::Host;
    if (!in_file) in_host += shard;
  }
  return places;
}

bool offloads(const RankRules& rules, const std::vector<memory::GroupPlace>& places) {
  return rules.settings.zero.offload_optimizer.ratio > 0 &&
         std::any_of(places.begin(), places.end(), [](const auto& place) { return place.optimizer != Tier::Device; });
}

memory::Placement by_budgets(const RankRules& rules, const Arrangement& arrangement, const std::vector<Unit>& units,
                             std::vector<memory::GroupPlace> places) {
  const auto& zero = rules.settings.zero;
  const auto& limits = rules.settings.memory;
  std::vector<memory::GroupSize> sizes;
  for (const auto& unit : units)
    sizes.push_back({.numel = unit.numel(),
                     .padded = unit.padded_numel(),
                     .shard = unit.shard_numel(),
                     .members = static_cast<std::int64_t>(unit.parameters.size()),
                     .trainable = unit.trainable,
                     .root = unit.root,
                     .persistent = unit.persistent});
  const memory::FootprintRules footprint{.stage = zero.stage,
                                         .world = rules.around.world,
                                         .parameter_width = rules.parameter_width,
                                         .gradient_width = rules.gradient_width,
                                         .wire_width = rules.wire_width,
                                         .num_slots = rules.num_slots,
                                         .ratio = zero.offload_optimizer.ratio,
                                         .on_cpu = !rules.around.gpu,
                                         .maps_shards = rules.in_place,
                                         .second_shards = rules.neighbours,
                                         .reads_gradients = rules.reads_gradients,
                                         .direct_gradients = rules.direct_gradients,
                                         .delayed = arrangement.delayed,
                                         .tile_numel = arrangement.tile_numel,
                                         .tiles = arrangement.tiles,
                                         .fetch_ahead = config::shards_fetched_ahead(zero.offload_param.buffer_count),
                                         .checksums = rules.settings.aio.checksums};
  return memory::place(footprint, sizes, std::move(places), rules.movable,
                       {.device = limits.device,
                        .host = limits.host,
                        .file = limits.file,
                        .activations = limits.activations.value_or(0)});
}

}  // namespace

const char* name(config::OptimizerType type) {
  using config::OptimizerType;
  switch (type) {
    case OptimizerType::Adam:
      return "Adam";
    case OptimizerType::Sgd:
      return "SGD";
    case OptimizerType::Adagrad:
      return "Adagrad";
    case OptimizerType::Lion:
      return "Lion";
    case OptimizerType::None:
    case OptimizerType::AdamW:
      break;
  }
  return "AdamW";
}

RankRules rank_rules(const config::Settings& settings, const Surroundings& around, std::int64_t accumulation,
                     const memory::Movable& movable) {
  RankRules rules{.settings = settings, .around = around, .accumulation = accumulation, .movable = movable};
  const auto& zero = settings.zero;
  const auto parameter = settings.precision,
             gradient = settings.grad_accum_dtype.value_or(accumulation > 1 ? config::Precision::Fp32 : parameter),
             wire = settings.communication_dtype.value_or(parameter);
  rules.parameter_width = width_of(parameter);
  rules.gradient_width = width_of(gradient);
  rules.wire_width = width_of(wire);
  rules.num_slots = slots_of(settings.optimizer);
  const bool one_dtype = gradient == parameter && wire == parameter;
  const int world = around.world;
  // Between processes of one host; ranks as threads copy, as GPUs do.
  rules.in_place = !around.gpu && world > 1 && around.transport == "shm";
  rules.reads_gradients = rules.in_place && (config::shards_gradients(zero.stage) || one_dtype);
  const bool mean = settings.reduce_op == config::ReduceOp::Mean;
  const double ahead = settings.prescale_gradients ? world : settings.predivide_factor;
  const bool divides = mean && static_cast<float>(1.0 / ahead) != 1.0f;
  rules.direct_gradients =
      one_dtype && (world == 1 ? !divides : rules.reads_gradients && !config::shards_gradients(zero.stage));
  const bool over_network =
      zero.stage == 3 && world > 1 && !around.gpu && (around.transport == "gloo" || around.transport == "shm+gloo");
  if (over_network) {
    rules.trainable_bits = zero.quantized_weights ? 8 : 0;
    rules.frozen_bits = zero.quantized_weights || zero.quantized_nontrainable_weights ? 8 : 0;
    rules.gradient_bits = zero.quantized_gradients ? 4 : 0;
  }
  if (zero.stage == 3 && world > 1 && !rules.in_place && zero.hpz_ranks > 1) rules.neighbours = zero.hpz_ranks;
  rules.overlap = zero.overlap_comm.value_or(zero.stage == 3 || rules.reads_gradients);
  return rules;
}

Arrangement arrange(const RankRules& rules, const std::vector<Unit>& units) {
  const auto& zero = rules.settings.zero;
  const auto& optimizer = zero.offload_optimizer;
  Arrangement result;
  auto places = configured_places(rules, units);
  result.delayed = zero.delayed_update && offloads(rules, places);
  auto limit = zero.sub_group_size;
  if (optimizer.buffer_size) limit = std::min(limit, *optimizer.buffer_size);
  result.tile_numel = config::tile_numel(limit);
  result.tiles = config::tiles_at_once(optimizer.buffer_count, rules.num_slots);
  const auto& limits = rules.settings.memory;
  if (limits.device || limits.host || limits.file) {
    result.by_budgets = by_budgets(rules, result, units, std::move(places));
    places = result.by_budgets->places;
    result.delayed = zero.delayed_update && offloads(rules, places);
  }
  for (std::size_t i = 0; i < units.size(); ++i) {
    Place place{.parameters = places[i].parameters, .optimizer = places[i].optimizer};
    place.sharded = config::shards_parameters(zero.stage, units[i].persistent, rules.around.world,
                                              place.parameters != Tier::Device);
    if (!place.sharded) place.parameters = Tier::Device;
    const auto shard_bytes = static_cast<std::size_t>(units[i].shard_numel() * rules.parameter_width);
    place.mapped =
        place.sharded && rules.in_place && place.parameters != Tier::File && shard_bytes >= config::kLeastMappedBytes;
    result.places.push_back(place);
  }
  return result;
}

std::string refusal_of(const RankRules& rules, const Arrangement& arrangement) {
  if (!arrangement.by_budgets || arrangement.by_budgets->fits) return "";
  const auto& placement = *arrangement.by_budgets;
  const auto& limits = rules.settings.memory;
  std::string over, helps;
  for (const auto tier : kTiers) {
    const auto name = base::join("memory.", MemoryReport::name(tier));
    const auto need = placement.need.total(tier) + (tier == Tier::Device ? limits.activations.value_or(0) : 0);
    if (const auto& limit = budget_of(limits, tier); limit && need > *limit)
      over += base::join(over.empty() ? "" : "; ", name, ": got ", *limit, " bytes, expected at least ", need,
                         " with everything moved off it that may move");
    if (const auto& smallest = placement.smallest[MemoryReport::index(tier)])
      helps += base::join(helps.empty() ? "" : ", or ", name, " = ", *smallest);
  }
  return base::join(over, ". Hint: the smallest budget that works is ",
                    helps.empty() ? "larger in more than one tier, or take a higher stage" : helps, ".");
}

// --- a unit -----------------------------------------------------------------------------------

PlacedUnit::PlacedUnit(const RankRules& rules, const Arrangement& arrangement, const Unit& unit, const Place& place)
    : rules(rules), arrangement(arrangement), unit(unit), place(place) {
  if (place.sharded) now = Residency::Sharded;
}

std::int64_t PlacedUnit::resting_bytes() const {
  return (place.sharded ? unit.shard_numel() : unit.padded_numel()) * rules.parameter_width;
}

std::int64_t PlacedUnit::owned() const {
  return config::shards_optimizer(rules.settings.zero.stage) ? unit.shard_numel() : unit.padded_numel();
}

bool PlacedUnit::offloads() const {
  return unit.trainable && place.optimizer != Tier::Device && rules.settings.zero.offload_optimizer.ratio > 0;
}

bool PlacedUnit::reduces_to_host() const {
  return offloads() && !rules.direct_gradients && config::shards_gradients(rules.settings.zero.stage) &&
         !rules.around.gpu;
}

bool PlacedUnit::copies_gradients() const { return offloads() && !reduces_to_host(); }

std::vector<PlacedUnit::Segment> PlacedUnit::segments() const {
  const auto numel = owned();
  const auto moved = offloads() ? config::moved_numel(numel, rules.settings.zero.offload_optimizer.ratio) : 0;
  const bool aliases =
      rules.parameter_width == config::kMasterWidth && place.parameters == Tier::Device && !arrangement.delayed;
  std::vector<Segment> all;
  if (moved > 0) all.push_back({place.optimizer, moved, false});
  if (moved < numel) all.push_back({Tier::Device, numel - moved, aliases});
  return all;
}

bool PlacedUnit::travels(const Segment& segment) const {
  return !segment.aliases_master &&
         (rests_in_file() || (rules.around.gpu && segment.tier != Tier::Device && place.parameters == Tier::Device));
}

std::unique_ptr<memory::Prefetcher> make_prefetcher(std::vector<memory::GatherUnit*> units,
                                                    const config::ZeroSettings& zero) {
  const bool in_files = std::any_of(units.begin(), units.end(), [](const auto* unit) { return unit->rests_in_file(); });
  return std::make_unique<memory::Prefetcher>(
      std::move(units),
      memory::Prefetcher::Policy{
          .ahead = zero.prefetch_bucket_size,
          .max_live = zero.max_live_parameters,
          .max_reuse = zero.max_reuse_distance,
          .fetch_ahead = in_files ? config::shards_fetched_ahead(zero.offload_param.buffer_count) : 0},
      [](const std::string&) {});
}

}  // namespace zero::planning
