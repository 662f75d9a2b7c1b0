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

using Purpose = MemoryReport::Purpose;

using config::kMasterWidth;
using config::whole_blocks;

}  // namespace

struct Run::Group final : PlacedUnit {
  Group(Run& run, const Unit& of, const Place& place) : PlacedUnit(run.rules_, run.arrangement_, of, place), run(run) {}

  std::int64_t width() const { return rules.parameter_width; }
  void forget() { second_kept = false; }

  void begin_fetch() override {
    if (!rests_in_file() || now != Residency::Sharded || fetching || unit.shard_numel() == 0) return;
    fetching = true;
    run.emit(*this, What::Parameters, How::Read, "arrives", Tier::File, Tier::Host, whole_blocks(resting_bytes()));
  }
  void cancel_fetch() override { fetching = false; }
  void begin_gather() override {
    begin_fetch();
    fetching = false;
    if (rules.around.gpu && place.parameters != Tier::Device)
      run.emit(*this, What::Parameters, How::Copy, "arrives", Tier::Host, Tier::Device, resting_bytes());
    auto& event =
        run.emit(*this, What::Parameters, How::AllGather, "before use", Tier::Device, Tier::Device, gathered_bytes());
    event.sent = rules.share(event.bytes);
    if (second_kept) {
      event.neighbours = true;
      event.sent = (rules.neighbours - 1) * event.bytes / rules.neighbours;
    } else if (gather_bits() > 0) {
      event.quantized = true;
      event.sent = (rules.around.world - 1) * base::quantized_bytes(unit.shard_numel(), gather_bits());
    }
    second_kept = rules.neighbours > 0;
    now = Residency::Gathering;
  }
  void finish_gather() override {
    if (now == Residency::Gathered) return;
    if (place.mapped)
      run.emit(*this, What::Parameters, How::InPlace, "before use", place.parameters, place.parameters,
               gathered_bytes())
          .sent = rules.share(gathered_bytes());
    else if (now == Residency::Sharded)
      begin_gather();
    now = Residency::Gathered;
  }
  void gather_copy() override { finish_gather(); }
  void release() override {
    if (place.sharded) now = Residency::Sharded;
  }

  Run& run;
  bool fetching = false, second_kept = false;
  bool reducing = false;  // begun and not finished
};

Run::Run(const RankRules& rules, const std::vector<Unit>& units, const Pass& pass)
    : rules_(rules),
      arrangement_(arrange(rules_, units)),
      zero_(rules_.settings.zero),
      units_(units),
      pass_(pass),
      reduce_order_(reduce_order(units)) {
  if (const auto text = refusal_of(rules_, arrangement_); !text.empty())
    throw ConfigError("[plan] " + text, ExitCode::kOutOfMemory);
  std::vector<memory::GatherUnit*> all;
  for (std::size_t g = 0; g < units_.size(); ++g) {
    groups_.push_back(std::make_unique<Group>(*this, units_[g], arrangement_.places[g]));
    all.push_back(groups_.back().get());
  }
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

  prefetcher_ = make_prefetcher(std::move(all), zero_);
  list_tiles();
}

Run::~Run() = default;

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

void Run::build() {
  phase_ = Phase::Build;
  for (const auto& group : groups_) {
    if (!rules_.around.deferred && rules_.around.world > 1) {
      const auto bytes = group->unit.padded_numel() * kMasterWidth;
      emit(*group, What::Parameters, How::Broadcast, "initial values", Tier::Device, Tier::Device, bytes).sent =
          rules_.share(bytes);
    }
    if (group->rests_in_file())
      emit(*group, What::Parameters, How::Write, "initial values", Tier::Host, Tier::File, group->resting_bytes());
    if (!group->unit.trainable) continue;
    for (const auto& segment : group->segments())
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
  const auto bytes = group.unit.padded_numel() * rules_.wire_width;
  const int stage = zero_.stage;
  if (rules_.direct_gradients && !rules_.reads_gradients) return;
  if (!config::reduces_now(stage, boundary)) return;
  const bool to_all = rules_.reads_gradients && !config::shards_optimizer(stage);
  auto& event = emit(group, What::Gradients, to_all ? How::AllReduce : How::ReduceScatter, "sum over ranks", Tier::Device,
                     Tier::Device, bytes);
  event.sent = rules_.share(bytes) * (to_all ? 2 : 1);
  if (rules_.gradient_bits > 0) {
    event.quantized = true;
    event.sent = (rules_.around.world - 1) * base::quantized_bytes(group.unit.shard_numel(), rules_.gradient_bits);
  }
  group.reducing = true;
}

void Run::finish_reduce(Group& group, bool boundary) {
  if (std::exchange(group.reducing, false) && !rules_.direct_gradients && !config::shards_optimizer(zero_.stage) &&
      rules_.around.world > 1 && !rules_.reads_gradients) {
    const auto bytes = group.unit.padded_numel() * rules_.wire_width;
    emit(group, What::Gradients, How::AllGather, "sum to all ranks", Tier::Device, Tier::Device, bytes).sent = rules_.share(bytes);
  }
  if (boundary && group.copies_gradients())
    emit(group, What::Gradients, How::Copy, "leaves", Tier::Device, Tier::Host, group.unit.shard_numel() * rules_.gradient_width);
}

void Run::micro_step(bool boundary, bool reads_ahead) {
  phase_ = Phase::Forward;
  for (const auto& parameters : pass_.forward) use(parameters);
  phase_ = Phase::Backward;
  prefetcher_->begin_backward();
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
      finish(config::reductions_beside(zero_.stage, rules_.reads_gradients, rules_.overlap, under_way.size()));
      begin_reduce(group, boundary);
      under_way.push_back(&group);
      if (reads_ahead && zero_.offload_optimizer.pipeline_read) fetch_tiles(slots_ * (next + 1) / reduce_order_.size());
    }
  }
  finish(0);
  prefetcher_->end_pass();
}

// --- a step ---------------------------------------------------------------------------------

bool Run::delays(std::int64_t step) const { return arrangement_.delayed && step >= zero_.delayed_start_step; }

void Run::step(std::int64_t number, bool overflow) {
  const bool managed = rules_.settings.managed_gradient_accumulation;
  for (std::int64_t micro = 0; micro < rules_.accumulation; ++micro) {
    micro_ = static_cast<int>(micro);
    const bool boundary = managed && micro + 1 == rules_.accumulation;
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
           group->place.parameters, group->owned() * group->width());
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
      for (const auto& segment : group->segments()) update_tiles(*group, segment, late);
      if (!late) group->forget();
    }
    if (!late) publish(*group);
  }
  fetched_ = 0;
}

void Run::list_tiles() {
  for (const auto& group : groups_) {
    if (!group->unit.trainable) continue;
    for (const auto& segment : group->segments()) {
      const bool in_file = segment.tier == Tier::File;
      if (!in_file && !group->travels(segment)) continue;
      for (std::int64_t begin = 0; begin < segment.numel; begin += arrangement_.tile_numel)
        tiles_.push_back({group.get(), std::min(arrangement_.tile_numel, segment.numel - begin), in_file});
    }
  }
  slots_ = std::min(tiles_.size(), static_cast<std::size_t>(arrangement_.tiles));
}

void Run::fetch_tiles(std::size_t end) {
  for (; fetched_ < std::min(end, tiles_.size()); ++fetched_) {
    const auto& tile = tiles_[fetched_];
    if (tile.in_file)
      emit(*tile.group, What::OptimizerStates, How::Read, "arrives", Tier::File, Tier::Host,
           tile.numel * (1 + rules_.num_slots) * kMasterWidth);
  }
}

void Run::update_tiles(Group& group, const Segment& segment, bool late) {
  const auto state_width = (1 + rules_.num_slots) * kMasterWidth;
  const bool in_file = segment.tier == Tier::File, copied = group.travels(segment);
  const bool by_tiles = in_file || copied;
  const auto tile = by_tiles ? arrangement_.tile_numel : segment.numel;
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
      emit(group, What::Parameters, group.rests_in_file() ? How::Write : How::Copy, "new values", Tier::Host, group.place.parameters,
           numel * group.width());
  }
}

void Run::publish(Group& group) {
  if (!group.unit.trainable || group.unit.padded_numel() == 0 ||
      !config::publishes_parameters(zero_.stage, group.place.sharded, rules_.around.world))
    return;
  const auto bytes = group.unit.padded_numel() * group.width();
  emit(group, What::Parameters, How::AllGather, "new values", Tier::Device, Tier::Device, bytes).sent = rules_.share(bytes);
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
  const int world = rules_.around.world, stage = zero_.stage;
  for (const auto& group : groups_) {
    const auto& unit = group->unit;
    const bool parts = world > 1;
    add(unit, 0, "parameters", Purpose::Parameters, rules_.parameter_width, group->place.sharded && parts, false, group->place.parameters,
        group->resting_bytes());
    if (group->place.sharded && !group->place.mapped && rules_.neighbours > 0)
      add(unit, 1, "second shards", Purpose::Parameters, rules_.parameter_width, true, false, Tier::Device,
          unit.padded_numel() / rules_.neighbours * rules_.parameter_width);
    if (!unit.trainable) continue;
    const bool shards = config::shards_gradients(stage) && parts;
    const auto shard_bytes = unit.shard_numel() * rules_.gradient_width;
    if (rules_.direct_gradients) {
      add(unit, 3, "gradients", Purpose::Gradients, rules_.gradient_width, false, true, Tier::Device, unit.numel() * rules_.gradient_width);
    } else {
      const bool on_host = group->reduces_to_host();
      const auto kept = (config::shards_gradients(stage) ? unit.shard_numel() : unit.padded_numel()) * rules_.gradient_width;
      add(unit, 3, "gradients", Purpose::Gradients, rules_.gradient_width, shards, false, on_host ? Tier::Host : Tier::Device, kept);
      if (on_host && arrangement_.delayed)
        add(unit, 4, "gradients handed over", Purpose::Gradients, rules_.gradient_width, shards, false, Tier::Host, kept);
    }
    if (group->copies_gradients()) {
      add(unit, 3, "gradients", Purpose::Gradients, rules_.gradient_width, parts, false, Tier::Host, shard_bytes);
      if (arrangement_.delayed) add(unit, 4, "gradients handed over", Purpose::Gradients, rules_.gradient_width, parts, false, Tier::Host, shard_bytes);
    }
    for (const auto& segment : group->segments()) {
      const auto bytes = segment.numel * kMasterWidth;
      const bool cut = config::shards_optimizer(stage) && parts;
      if (!segment.aliases_master)
        add(unit, 5, "master parameters", Purpose::MasterParameters, kMasterWidth, cut, false, segment.tier, bytes);
      if (rules_.num_slots > 0)
        add(unit, 6, "optimizer states", Purpose::OptimizerStates, kMasterWidth, cut, false, segment.tier, bytes, rules_.num_slots);
    }
    if (group->has_next())
      add(unit, 2, "parameters to come", Purpose::Parameters, rules_.parameter_width, parts, false, Tier::Host,
          group->owned() * rules_.parameter_width);
  }
  std::vector<Holding> result;
  for (auto& [key, holding] : all) result.push_back(std::move(holding));
  return result;
}

}  // namespace zero::planning
