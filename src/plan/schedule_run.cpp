// See schedule_run.h.
#include "plan/schedule_run.h"

#include <algorithm>
#include <map>
#include <tuple>

#include <zero/errors.h>

#include "base/quantize.h"
#include "config/stage_rules.h"
#include "config/tier_rules.h"

namespace zero::planning {
namespace {

using config::OffloadDevice;
using Purpose = MemoryReport::Purpose;

using config::kMasterWidth;
using config::whole_blocks;

}  // namespace

// What ParamGroup is to the engine.
struct Run::Group final : memory::GatherUnit {
  Group(Run& run, const Unit& of) : run(run), unit(of) {}

  const std::string& name() const override { return unit.name; }
  bool root() const override { return unit.root; }
  std::int64_t padded_numel() const override { return unit.padded_numel(); }
  bool rests_sharded() const override { return sharded; }
  bool rests_in_file() const override { return sharded && parameters == Tier::File; }
  bool gathers_in_place() const override { return mapped; }
  Residency residency() const override { return now; }

  std::int64_t width() const { return run.facts_.parameter_width; }
  std::int64_t resting() const { return sharded ? unit.shard_numel() : unit.padded_numel(); }
  std::int64_t owned() const {
    return config::shards_optimizer(run.zero_.stage) ? unit.shard_numel() : unit.padded_numel();
  }
  bool offloads() const { return optimizer != Tier::Device && run.zero_.offload_optimizer.ratio > 0; }
  bool has_next() const { return unit.trainable && run.delayed_ && offloads(); }
  // The reduced shard, in host memory apart from where it was reduced to.
  bool copies_gradients() const {
    return unit.trainable && offloads() &&
           (run.facts_.direct_gradients || !config::shards_gradients(run.zero_.stage) || run.facts_.around.gpu);
  }
  void forget() { second_kept = false; }

  void begin_fetch() override {
    if (!rests_in_file() || now != Residency::Sharded || fetching || unit.shard_numel() == 0) return;
    fetching = true;
    run.emit(*this, What::Parameters, How::Read, "arrives", Tier::File, Tier::Host, whole_blocks(resting() * width()));
  }
  void cancel_fetch() override { fetching = false; }
  void begin_gather() override {
    begin_fetch();
    fetching = false;
    if (run.facts_.around.gpu && parameters != Tier::Device)
      run.emit(*this, What::Parameters, How::Copy, "arrives", Tier::Host, Tier::Device, resting() * width());
    auto& event = run.emit(*this, What::Parameters, How::AllGather, "before use", Tier::Device, Tier::Device,
                           unit.padded_numel() * width());
    const int bits = unit.trainable ? run.facts_.trainable_bits : run.facts_.frozen_bits;
    event.sent = run.share(event.bytes);
    if (second_kept) {
      event.neighbours = true;
      const auto ranks = run.facts_.neighbours;
      event.sent = (ranks - 1) * event.bytes / ranks;
    } else if (bits > 0) {
      event.quantized = true;
      event.sent = (run.facts_.around.world - 1) * base::quantized_bytes(unit.shard_numel(), bits);
    }
    second_kept = run.facts_.neighbours > 0;
    now = Residency::Gathering;
  }
  void finish_gather() override {
    if (now == Residency::Gathered) return;
    if (mapped) {
      const auto bytes = unit.padded_numel() * width();
      run.emit(*this, What::Parameters, How::InPlace, "before use", parameters, parameters, bytes).sent = run.share(bytes);
    } else if (now == Residency::Sharded) {
      begin_gather();
    }
    now = Residency::Gathered;
  }
  void gather_copy() override { finish_gather(); }
  void release() override {
    if (sharded) now = Residency::Sharded;
  }

  Run& run;
  const Unit& unit;
  Tier parameters = Tier::Device, optimizer = Tier::Device;
  bool sharded = false, mapped = false;
  Residency now = Residency::Gathered;
  bool fetching = false, second_kept = false;
  bool reducing = false;  // begun and not finished
};

Run::Run(const Facts& facts, const std::vector<Unit>& units, const Pass& pass)
    : facts_(facts), zero_(facts_.settings.zero), units_(units), pass_(pass), reduce_order_(reduce_order(units)) {
  for (const auto& unit : units_) groups_.push_back(std::make_unique<Group>(*this, unit));
  place();
  std::size_t num_parameters = 0;
  for (const auto& unit : units_) num_parameters += unit.parameters.size();
  group_of_.resize(num_parameters);
  for (std::size_t g = 0; g < units_.size(); ++g)
    for (const auto i : units_[g].parameters) group_of_.at(i) = g;
  ready_after_.assign(groups_.size(), pass_.backward.empty() ? 0 : pass_.backward.size() - 1);
  std::vector<char> seen(groups_.size());
  for (auto k = pass_.backward.size(); k-- > 0;)
    for (const auto i : pass_.backward[k])
      if (!std::exchange(seen[group_of_.at(i)], 1)) ready_after_[group_of_[i]] = k;
  // Roots are read at both ends of a pass.
  for (std::size_t g = 0; g < groups_.size(); ++g)
    if (units_[g].root && !pass_.backward.empty()) ready_after_[g] = pass_.backward.size() - 1;

  std::vector<memory::GatherUnit*> all;
  bool in_files = false;
  for (const auto& group : groups_) {
    all.push_back(group.get());
    in_files |= group->rests_in_file();
  }
  prefetcher_ = std::make_unique<memory::Prefetcher>(
      std::move(all),
      memory::Prefetcher::Policy{.ahead = zero_.prefetch_bucket_size,
                                 .max_live = zero_.max_live_parameters,
                                 .max_reuse = zero_.max_reuse_distance,
                                 .fetch_ahead = in_files ? config::shards_fetched_ahead(zero_.offload_param.buffer_count) : 0},
      [](const std::string&) {});
}

Run::~Run() = default;

// As engine/tier_plan.h.
void Run::place() {
  const auto& optimizer = zero_.offload_optimizer;
  const auto& param = zero_.offload_param;
  const int world = facts_.around.world;
  std::int64_t in_host = 0;
  bool offloads = false;
  for (const auto& group : groups_) {
    const auto& unit = group->unit;
    if (zero_.stage >= 1 && optimizer.device != OffloadDevice::None)
      group->optimizer = optimizer.device == OffloadDevice::Nvme ? Tier::File : Tier::Host;
    if (zero_.stage == 3 && !unit.persistent && param.device != OffloadDevice::None) {
      const auto shard = (unit.numel() + world - 1) / world;
      group->parameters = param.device == OffloadDevice::Nvme && in_host + shard > param.max_in_cpu ? Tier::File : Tier::Host;
      if (group->parameters == Tier::Host) in_host += shard;
    }
    offloads |= group->offloads();
  }
  delayed_ = zero_.delayed_update && offloads;
  auto limit = zero_.sub_group_size;
  if (optimizer.buffer_size) limit = std::min(limit, *optimizer.buffer_size);
  tile_numel_ = config::tile_numel(limit);
  keep_budgets();
  offloads = false;
  for (const auto& group : groups_) {
    const auto& unit = group->unit;
    group->sharded = config::shards_parameters(zero_.stage, unit.persistent, world, group->parameters != Tier::Device);
    if (!group->sharded) group->parameters = Tier::Device;
    const auto shard_bytes = static_cast<std::size_t>(unit.shard_numel() * facts_.parameter_width);
    group->mapped = group->sharded && facts_.in_place && group->parameters != Tier::File &&
                    shard_bytes >= config::kLeastMappedBytes;
    if (group->sharded) group->now = memory::GatherUnit::Residency::Sharded;
    offloads |= group->offloads();
  }
  delayed_ = zero_.delayed_update && offloads;
  list_tiles();
}

void Run::keep_budgets() {
  const auto& limits = facts_.settings.memory;
  if (!limits.device && !limits.host && !limits.file) return;
  const auto& optimizer = zero_.offload_optimizer;
  std::vector<memory::GroupSize> sizes;
  std::vector<memory::GroupPlace> places;
  for (const auto& group : groups_) {
    const auto& unit = group->unit;
    sizes.push_back({.numel = unit.numel(),
                     .padded = unit.padded_numel(),
                     .shard = unit.shard_numel(),
                     .members = static_cast<std::int64_t>(unit.parameters.size()),
                     .trainable = unit.trainable,
                     .root = unit.root,
                     .persistent = unit.persistent});
    places.push_back({group->parameters, group->optimizer});
  }
  const memory::FootprintRules rules{
      .stage = zero_.stage,
      .world = facts_.around.world,
      .parameter_width = facts_.parameter_width,
      .gradient_width = facts_.gradient_width,
      .wire_width = facts_.wire_width,
      .num_slots = facts_.num_slots,
      .ratio = optimizer.ratio,
      .on_cpu = !facts_.around.gpu,
      .maps_shards = facts_.in_place,
      .second_shards = facts_.neighbours,
      .reads_gradients = facts_.reads_gradients,
      .direct_gradients = facts_.direct_gradients,
      .delayed = delayed_,
      .tile_numel = tile_numel_,
      .tiles = slots_of_update(),
      .fetch_ahead = config::shards_fetched_ahead(zero_.offload_param.buffer_count)};
  const auto placement = memory::place(
      rules, sizes, std::move(places), facts_.movable,
      {.device = limits.device, .host = limits.host, .file = limits.file, .activations = limits.activations.value_or(0)});
  if (!placement.fits)
    throw ConfigError("[plan] got budgets `memory` that these states do not fit, expected larger ones. Hint: a higher stage, or "
                      "memory.file, so that states can move to a file.",
                      ExitCode::kOutOfMemory);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    groups_[g]->parameters = placement.places[g].parameters;
    groups_[g]->optimizer = placement.places[g].optimizer;
  }
}

std::vector<Run::Segment> Run::segments(const Group& group) const {
  const auto numel = group.owned();
  const auto moved = group.offloads() ? config::moved_numel(numel, zero_.offload_optimizer.ratio) : 0;
  const bool aliases = facts_.parameter_width == kMasterWidth && group.parameters == Tier::Device && !delayed_;
  std::vector<Segment> all;
  if (moved > 0) all.push_back({group.optimizer, moved, false});
  if (moved < numel) all.push_back({Tier::Device, numel - moved, aliases});
  return all;
}

Event& Run::emit(const Group& group, What what, How how, const char* purpose, Tier from, Tier to, std::int64_t bytes) {
  events_.push_back({.step = step_,
                     .micro = micro_,
                     .phase = phase_,
                     .what = what,
                     .how = how,
                     .purpose = purpose,
                     .unit = group.unit.name,
                     .from = from,
                     .to = to,
                     .bytes = bytes});
  return events_.back();
}

std::int64_t Run::share(std::int64_t bytes) const {
  const std::int64_t world = facts_.around.world;
  return (world - 1) * bytes / world;
}

void Run::build() {
  phase_ = Phase::Build;
  for (const auto& group : groups_) {
    if (!facts_.around.deferred && facts_.around.world > 1) {
      const auto bytes = group->unit.padded_numel() * kMasterWidth;
      emit(*group, What::Parameters, How::Broadcast, "initial values", Tier::Device, Tier::Device, bytes).sent = share(bytes);
    }
    if (group->rests_in_file())
      emit(*group, What::Parameters, How::Write, "initial values", Tier::Host, Tier::File, group->resting() * group->width());
    if (!group->unit.trainable) continue;
    for (const auto& segment : segments(*group))
      if (segment.tier == Tier::File)
        emit(*group, What::OptimizerStates, How::Write, "initial values", Tier::Host, Tier::File, segment.numel * kMasterWidth);
  }
}

// --- a micro-batch --------------------------------------------------------------------------

void Run::use(const std::vector<std::size_t>& parameters) {
  if (zero_.stage < 3) return;
  std::vector<int> groups;
  for (const auto i : parameters) {
    const auto g = static_cast<int>(group_of_.at(i));
    if (std::find(groups.begin(), groups.end(), g) == groups.end()) groups.push_back(g);
  }
  prefetcher_->use(groups.data(), static_cast<int>(groups.size()), /*training=*/true);
}

void Run::begin_reduce(Group& group, bool boundary) {
  if (group.unit.padded_numel() == 0) return;
  const auto bytes = group.unit.padded_numel() * facts_.wire_width;
  const int stage = zero_.stage;
  if (facts_.direct_gradients && !facts_.reads_gradients) return;
  if (!config::reduces_now(stage, boundary)) return;
  const bool to_all = facts_.reads_gradients && !config::shards_optimizer(stage);
  auto& event = emit(group, What::Gradients, to_all ? How::AllReduce : How::ReduceScatter, "sum over ranks", Tier::Device,
                     Tier::Device, bytes);
  event.sent = share(bytes) * (to_all ? 2 : 1);
  if (facts_.gradient_bits > 0) {
    event.quantized = true;
    event.sent = (facts_.around.world - 1) * base::quantized_bytes(group.unit.shard_numel(), facts_.gradient_bits);
  }
  group.reducing = true;
}

void Run::finish_reduce(Group& group, bool boundary) {
  if (std::exchange(group.reducing, false) && !facts_.direct_gradients && !config::shards_optimizer(zero_.stage) &&
      facts_.around.world > 1 && !facts_.reads_gradients) {
    const auto bytes = group.unit.padded_numel() * facts_.wire_width;
    emit(group, What::Gradients, How::AllGather, "sum to all ranks", Tier::Device, Tier::Device, bytes).sent = share(bytes);
  }
  if (boundary && group.copies_gradients())
    emit(group, What::Gradients, How::Copy, "leaves", Tier::Device, Tier::Host, group.unit.shard_numel() * facts_.gradient_width);
}

void Run::micro_step(bool boundary, bool reads_ahead) {
  phase_ = Phase::Forward;
  for (const auto& parameters : pass_.forward) use(parameters);
  phase_ = Phase::Backward;
  prefetcher_->begin_backward();
  if (reads_ahead && zero_.offload_optimizer.pipeline_read) fetch_tiles(slots_);
  std::vector<Group*> under_way;
  std::size_t next = 0;
  const auto finish = [&](std::size_t most) {
    while (under_way.size() > most) {
      finish_reduce(*under_way.front(), boundary);
      under_way.erase(under_way.begin());
    }
  };
  for (std::size_t k = 0; k < pass_.backward.size(); ++k) {
    use(pass_.backward[k]);
    for (; next < reduce_order_.size() && ready_after_[reduce_order_[next]] <= k; ++next) {
      auto& group = *groups_[reduce_order_[next]];
      finish(config::reductions_beside(zero_.stage, facts_.reads_gradients, facts_.overlap, under_way.size()));
      begin_reduce(group, boundary);
      under_way.push_back(&group);
    }
  }
  finish(0);
  prefetcher_->end_pass();
}

// --- a step ---------------------------------------------------------------------------------

bool Run::delays(std::int64_t step) const { return delayed_ && step >= zero_.delayed_start_step; }

void Run::step(std::int64_t number, bool overflow) {
  const bool managed = facts_.settings.managed_gradient_accumulation;
  for (std::int64_t micro = 0; micro < facts_.accumulation; ++micro) {
    micro_ = static_cast<int>(micro);
    const bool boundary = managed && micro + 1 == facts_.accumulation;
    // States are at rest until the update.
    micro_step(boundary, boundary && !delays(number) && !pending_);
  }
  micro_ = 0;
  phase_ = Phase::Step;
  prefetcher_->end_pass();
  if (!managed) {
    for (const auto g : reduce_order_) {
      if (!config::shards_gradients(zero_.stage)) begin_reduce(*groups_[g], /*boundary=*/true);
      finish_reduce(*groups_[g], /*boundary=*/true);
    }
  }
  const bool late = delays(number);
  if (std::exchange(pending_, false)) adopt_late();
  if (!overflow) update(late);
  phase_ = Phase::Step;
  prefetcher_->fetch_first();
  ++step_;
}

void Run::adopt_late() {
  for (const auto& group : groups_) {
    if (group->has_next()) {
      emit(*group, What::Parameters, group->rests_in_file() ? How::Write : How::Copy, "new values", Tier::Host,
           group->parameters, group->owned() * group->width());
      group->forget();
    }
    publish(*group);
  }
}

void Run::update(bool late) {
  if (late) {
    pending_ = true;
    phase_ = Phase::Beside;
  }
  next_tile_ = 0;
  for (const auto& group : groups_) {
    if (group->unit.trainable) {
      for (const auto& segment : segments(*group)) update_tiles(*group, segment, late);
      if (!late) group->forget();
    }
    if (!late) publish(*group);
  }
  fetched_ = 0;
}

// The compute copy is not where the update writes.
bool Run::travels(const Group& group, const Segment& segment) const {
  return !segment.aliases_master &&
         (group.rests_in_file() || (facts_.around.gpu && segment.tier != Tier::Device && group.parameters != Tier::Host));
}

void Run::list_tiles() {
  for (const auto& group : groups_) {
    if (!group->unit.trainable) continue;
    for (const auto& segment : segments(*group)) {
      const bool in_file = segment.tier == Tier::File;
      if (!in_file && !travels(*group, segment)) continue;
      for (std::int64_t begin = 0; begin < segment.numel; begin += tile_numel_)
        tiles_.push_back({group.get(), std::min(tile_numel_, segment.numel - begin), in_file});
    }
  }
  slots_ = std::min(tiles_.size(), static_cast<std::size_t>(slots_of_update()));
}

void Run::fetch_tiles(std::size_t end) {
  for (; fetched_ < std::min(end, tiles_.size()); ++fetched_) {
    const auto& tile = tiles_[fetched_];
    if (tile.in_file)
      emit(*tile.group, What::OptimizerStates, How::Read, "arrives", Tier::File, Tier::Host,
           tile.numel * (1 + facts_.num_slots) * kMasterWidth);
  }
}

// As engine/tier_plan.h.
std::int64_t Run::slots_of_update() const {
  return config::tiles_at_once(zero_.offload_optimizer.buffer_count, facts_.num_slots);
}

void Run::update_tiles(Group& group, const Segment& segment, bool late) {
  const auto state_width = (1 + facts_.num_slots) * kMasterWidth;
  const bool in_file = segment.tier == Tier::File, copied = travels(group, segment);
  const bool by_tiles = in_file || copied;
  const auto tile = by_tiles ? tile_numel_ : segment.numel;
  const auto at = in_file ? Tier::Host : segment.tier;
  for (std::int64_t begin = 0; begin < segment.numel; begin += tile) {
    const auto numel = std::min(tile, segment.numel - begin);
    if (by_tiles) {
      const auto ahead = zero_.offload_optimizer.pipeline_read ? std::max<std::size_t>(slots_, 2) - 1 : 1;
      fetch_tiles(next_tile_++ + ahead);
    }
    emit(group, What::OptimizerStates, How::Update, "update", at, at, numel * state_width);
    if (in_file) emit(group, What::OptimizerStates, How::Write, "leaves", Tier::Host, Tier::File, numel * state_width);
    if (copied && !late)
      emit(group, What::Parameters, group.rests_in_file() ? How::Write : How::Copy, "new values", Tier::Host, group.parameters,
           numel * group.width());
  }
}

void Run::publish(Group& group) {
  if (!group.unit.trainable || group.unit.padded_numel() == 0 ||
      !config::publishes_parameters(zero_.stage, group.sharded, facts_.around.world))
    return;
  const auto bytes = group.unit.padded_numel() * group.width();
  emit(group, What::Parameters, How::AllGather, "new values", Tier::Device, Tier::Device, bytes).sent = share(bytes);
}

// --- between steps --------------------------------------------------------------------------

std::vector<Holding> Run::holdings() const {
  std::map<std::tuple<int, bool, bool, int, std::string>, Holding> all;
  const auto add = [&](const Unit& unit, int order, const char* state, Purpose purpose, int width, bool sharded, bool passing, Tier tier,
                       std::int64_t bytes, int vectors = 1) {
    if (bytes == 0) return;
    auto& holding = all[{order, sharded, passing, static_cast<int>(tier), state}];
    holding.state = state;
    holding.purpose = purpose;
    holding.width = width;
    holding.sharded = sharded;
    holding.passing = passing;
    holding.tier = tier;
    if (holding.units.empty() || holding.units.back() != unit.name) holding.units.push_back(unit.name);
    holding.bytes += vectors * (tier == Tier::File ? whole_blocks(bytes) : bytes);
  };
  const int world = facts_.around.world, stage = zero_.stage;
  for (const auto& group : groups_) {
    const auto& unit = group->unit;
    const bool parts = world > 1;
    add(unit, 0, "parameters", Purpose::Parameters, facts_.parameter_width, group->sharded && parts, false, group->parameters,
        group->resting() * facts_.parameter_width);
    if (group->sharded && !group->mapped && facts_.neighbours > 0)
      add(unit, 1, "second shards", Purpose::Parameters, facts_.parameter_width, true, false, Tier::Device,
          unit.padded_numel() / facts_.neighbours * facts_.parameter_width);
    if (!unit.trainable) continue;
    const bool shards = config::shards_gradients(stage) && parts;
    const auto shard_bytes = unit.shard_numel() * facts_.gradient_width;
    if (facts_.direct_gradients) {
      add(unit, 3, "gradients", Purpose::Gradients, facts_.gradient_width, false, true, Tier::Device, unit.numel() * facts_.gradient_width);
    } else {
      const bool on_host = group->offloads() && config::shards_gradients(stage) && !facts_.around.gpu;
      const auto kept = (config::shards_gradients(stage) ? unit.shard_numel() : unit.padded_numel()) * facts_.gradient_width;
      add(unit, 3, "gradients", Purpose::Gradients, facts_.gradient_width, shards, false, on_host ? Tier::Host : Tier::Device, kept);
      if (on_host && delayed_)
        add(unit, 4, "gradients handed over", Purpose::Gradients, facts_.gradient_width, shards, false, Tier::Host, kept);
    }
    if (group->copies_gradients()) {
      add(unit, 3, "gradients", Purpose::Gradients, facts_.gradient_width, parts, false, Tier::Host, shard_bytes);
      if (delayed_) add(unit, 4, "gradients handed over", Purpose::Gradients, facts_.gradient_width, parts, false, Tier::Host, shard_bytes);
    }
    for (const auto& segment : segments(*group)) {
      const auto bytes = segment.numel * kMasterWidth;
      const bool cut = config::shards_optimizer(stage) && parts;
      if (!segment.aliases_master)
        add(unit, 5, "master parameters", Purpose::MasterParameters, kMasterWidth, cut, false, segment.tier, bytes);
      if (facts_.num_slots > 0)
        add(unit, 6, "optimizer states", Purpose::OptimizerStates, kMasterWidth, cut, false, segment.tier, bytes, facts_.num_slots);
    }
    if (group->has_next())
      add(unit, 2, "parameters to come", Purpose::Parameters, facts_.parameter_width, parts, false, Tier::Host,
          group->owned() * facts_.parameter_width);
  }
  std::vector<Holding> result;
  for (auto& [key, holding] : all) result.push_back(std::move(holding));
  return result;
}

}  // namespace zero::planning
