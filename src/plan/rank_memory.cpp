// See rank_memory.h.
#include "plan/rank_memory.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/quantize.h"
#include "config/stage_rules.h"
#include "config/tier_rules.h"

namespace zero::planning {
namespace {

using Residency = memory::GatherUnit::Residency;

using config::kMasterWidth;
using config::whole_blocks;

}  // namespace

// --- buffers ----------------------------------------------------------------------------------

// As memory/buffer_pool.h: what is idle and large enough, the smallest; else one that is too small makes room.
struct RankMemory::Pool {
  Pool(RankMemory& memory, Purpose purpose) : memory(memory), purpose(purpose) {}
  struct Owned {
    std::int64_t bytes;
    bool in_use;
    int id;
  };
  int take(std::int64_t bytes) {
    Owned* best = nullptr;
    for (auto& each : owned)
      if (!each.in_use && each.bytes >= bytes && (best == nullptr || each.bytes < best->bytes)) best = &each;
    if (best == nullptr) {
      const auto idle = std::find_if(owned.begin(), owned.end(), [](const Owned& each) { return !each.in_use; });
      if (idle != owned.end()) {
        memory.book(Tier::Device, purpose, -idle->bytes);
        owned.erase(idle);
      }
      owned.push_back({bytes, false, ++made});
      memory.book(Tier::Device, purpose, bytes);
      best = &owned.back();
    }
    best->in_use = true;
    return best->id;
  }
  void put(int id) {
    for (auto& each : owned)
      if (each.id == id) each.in_use = false;
  }
  void trim() {
    std::erase_if(owned, [&](const Owned& each) {
      if (!each.in_use) memory.book(Tier::Device, purpose, -each.bytes);
      return !each.in_use;
    });
  }
  RankMemory& memory;
  const Purpose purpose;
  std::vector<Owned> owned;
  int made = 0;
};

// As memory/block_pool.h: one list a size.
struct RankMemory::Blocks {
  Blocks(RankMemory& memory, Purpose purpose) : memory(memory), purpose(purpose) {}
  bool serves(std::int64_t bytes) const { return open && sizes.count(bytes) != 0; }
  std::shared_ptr<Block> take(std::int64_t bytes) {
    auto& count = idle[bytes];
    if (count > 0)
      --count;
    else
      memory.book(Tier::Device, purpose, bytes);
    return std::make_shared<Block>(memory, bytes, /*pooled=*/true);
  }
  void trim() {
    for (auto& [bytes, count] : idle) {
      memory.book(Tier::Device, purpose, -bytes * count);
      count = 0;
    }
  }
  RankMemory& memory;
  const Purpose purpose;
  bool open = false;
  std::map<std::int64_t, bool> sizes;
  std::map<std::int64_t, std::int64_t> idle;
};

Block::~Block() { memory_.free(*this); }

void RankMemory::free(Block& block) {
  if (block.pooled_)
    ++blocks_->idle[block.bytes_];
  else
    book(Tier::Device, Purpose::Activations, -block.bytes_);
}

Tensor RankMemory::make(std::int64_t bytes) {
  if (blocks_ && in_backward_ && blocks_->serves(bytes + config::kReadableOverhead))
    return blocks_->take(bytes + config::kReadableOverhead);
  book(Tier::Device, Purpose::Activations, bytes);
  return std::make_shared<Block>(*this, bytes, /*pooled=*/false);
}

// As offload/depot.h: a file begins with 16 MiB, doubles, and stays; on their way to it and back, two at a time are in
// host memory.
void RankMemory::put_away(Tier tier, std::int64_t bytes) {
  constexpr std::int64_t kFirstBytes = std::int64_t{16} << 20;
  if (rules_.around.gpu) moved_.to_host += bytes;
  if (tier == Tier::Host) return book(Tier::Host, Purpose::Activations, bytes);
  moved_.written += bytes;
  if (++away_ <= 2) book(Tier::Host, Purpose::Activations, bytes);
  away_bytes_ += whole_blocks(bytes);
  if (away_bytes_ <= file_bytes_) return;
  const auto more = std::max(file_bytes_, (whole_blocks(bytes) + kFirstBytes - 1) / kFirstBytes * kFirstBytes);
  book(Tier::File, Purpose::Activations, more);
  file_bytes_ += more;
}

void RankMemory::bring_back(Tier tier, std::int64_t bytes) {
  if (rules_.around.gpu) moved_.from_host += bytes;
  if (tier == Tier::Host) return book(Tier::Host, Purpose::Activations, -bytes);
  moved_.read += bytes;
  if (--away_ < 2) book(Tier::Host, Purpose::Activations, -bytes);
  away_bytes_ -= whole_blocks(bytes);
}

// --- a unit -----------------------------------------------------------------------------------

struct RankMemory::Group final : PlacedUnit {
  Group(RankMemory& memory, const Unit& of, const Place& place)
      : PlacedUnit(memory.rules_, memory.arrangement_, of, place), memory(memory) {}

  void begin_fetch() override {
    if (!rests_in_file() || now != Residency::Sharded || fetched > 0 || unit.shard_numel() == 0) return;
    fetched = whole_blocks(resting_bytes());
    memory.moved_.read += fetched;
    memory.book(Tier::Host, Purpose::GatherBuffers, fetched);
  }
  void cancel_fetch() override { memory.book(Tier::Host, Purpose::GatherBuffers, -std::exchange(fetched, 0)); }
  void begin_gather() override {
    begin_fetch();
    buffer = memory.gathers_->take(gathered_bytes());
    if (rules.around.gpu && place.parameters != Tier::Device) memory.moved_.from_host += resting_bytes();
    const bool from_neighbours = second_kept;
    if (!from_neighbours && gather_bits() > 0)
      integers = memory.gathers_->take(rules.around.world * base::quantized_bytes(unit.shard_numel(), gather_bits()));
    if (!from_neighbours) count_gather();
    second_kept = rules.neighbours > 0;
    now = Residency::Gathering;
  }
  void finish_gather() override {
    if (now == Residency::Gathered) return;
    if (place.mapped) {
      count_gather();
    } else {
      if (now == Residency::Sharded) begin_gather();
      end_gather();
    }
    now = Residency::Gathered;
  }
  void end_gather() {
    cancel_fetch();
    if (integers != 0) memory.gathers_->put(std::exchange(integers, 0));
  }
  // As the world's communicator counts it: not what goes between neighbours.
  void count_gather() {
    const bool as_integers = !place.mapped && gather_bits() > 0;
    memory.moved_.gathered += as_integers
                                  ? (rules.around.world - 1) * base::quantized_bytes(unit.shard_numel(), gather_bits())
                                  : rules.share(gathered_bytes());
    ++memory.moved_.collectives;
  }
  void gather_copy() override { finish_gather(); }
  void release() override {
    if (!place.sharded || now == Residency::Sharded) return;
    if (now == Residency::Gathering) end_gather();
    if (buffer != 0) memory.gathers_->put(std::exchange(buffer, 0));
    now = Residency::Sharded;
  }

  RankMemory& memory;
  std::int64_t fetched = 0;
  int buffer = 0, integers = 0;  // of the gather pool
  bool second_kept = false;      // neighbours have all of it

  // Gradients of a micro-batch.
  std::size_t awaited = 0;
  std::vector<char> taken;
  std::vector<std::shared_ptr<Block>> kept;    // autograd's own, or those on their way to the other ranks
  std::vector<char> rebooked;  // of kept: counted as gradients
  int input = 0, output = 0;   // of the reduce pool
};

// --- at rest ----------------------------------------------------------------------------------

RankMemory::RankMemory(const RankRules& rules, const std::vector<Unit>& units, std::int64_t buffer_bytes)
    : rules_(rules),
      arrangement_(arrange(rules_, units)),
      gathers_(std::make_unique<Pool>(*this, Purpose::GatherBuffers)),
      reductions_(std::make_unique<Pool>(*this, Purpose::ReduceBuffers)) {
  const auto& zero = rules_.settings.zero;
  if (rules_.reads_gradients)
    blocks_ = std::make_unique<Blocks>(
        *this, config::shards_gradients(zero.stage) ? Purpose::ReduceBuffers : Purpose::Gradients);
  std::size_t num_parameters = 0;
  std::vector<memory::GatherUnit*> all;
  for (std::size_t g = 0; g < units.size(); ++g) {
    const auto& unit = units[g];
    num_parameters += unit.parameters.size();
    auto group = std::make_unique<Group>(*this, unit, arrangement_.places[g]);
    group->taken.resize(unit.parameters.size());
    group->kept.resize(unit.parameters.size());
    group->rebooked.resize(unit.parameters.size());
    book_resting(*group);
    if (blocks_ && unit.trainable && rules_.wire_width == rules_.parameter_width)
      for (std::size_t i = 0; i < unit.parameters.size(); ++i)
        blocks_->sizes[unit.layout.parameter_numel(i) * rules_.parameter_width + config::kReadableOverhead] = true;
    all.push_back(group.get());
    groups_.push_back(std::move(group));
  }
  member_of_.resize(num_parameters);
  for (std::size_t g = 0; g < units.size(); ++g)
    for (std::size_t i = 0; i < units[g].parameters.size(); ++i) member_of_.at(units[g].parameters[i]) = {g, i};
  for (const auto g : planning::reduce_order(units)) reduce_order_.push_back(groups_[g].get());
  book_update_tiles();
  book(Tier::Device, Purpose::Other, buffer_bytes);
  gathering_ = make_prefetcher(std::move(all), zero);
}

RankMemory::~RankMemory() { drop_gradients(); }

void RankMemory::book_resting(Group& group) {
  const auto rest = [&](Tier tier, Purpose purpose, std::int64_t bytes, int vectors = 1) {
    const auto each = tier == Tier::File ? whole_blocks(bytes) : bytes;
    book(tier, purpose, vectors * each);
    if (tier == Tier::File && rules_.settings.aio.checksums)
      book(Tier::Host, Purpose::Other, vectors * config::checksum_bytes(each));
  };
  rest(group.place.parameters, Purpose::Parameters, group.resting_bytes());
  if (group.place.sharded && !group.place.mapped && rules_.neighbours > 0)
    book(Tier::Device, Purpose::Parameters,
         group.unit.padded_numel() / rules_.neighbours * rules_.parameter_width);  // second shards
  if (!group.unit.trainable) return;
  for (const auto& segment : group.segments()) {
    const auto bytes = segment.numel * kMasterWidth;
    if (!segment.aliases_master) rest(segment.tier, Purpose::MasterParameters, bytes);
    rest(segment.tier, Purpose::OptimizerStates, bytes, rules_.num_slots);
  }
  const bool sharded = config::shards_gradients(rules_.settings.zero.stage);
  const auto shard = group.unit.shard_numel() * rules_.gradient_width;
  if (!rules_.direct_gradients)
    book(group.reduces_to_host() ? Tier::Host : Tier::Device, Purpose::Gradients,
         sharded ? shard : group.unit.padded_numel() * rules_.gradient_width);
  if (group.copies_gradients()) book(Tier::Host, Purpose::Gradients, shard);
  if (!group.has_next()) return;
  book(Tier::Host, Purpose::Gradients, shard);
  book(Tier::Host, Purpose::Parameters, group.owned() * rules_.parameter_width);
}

// As StagedUpdate: buffers of the tiles that are read, updated and written at once.
void RankMemory::book_update_tiles() {
  const auto tile = arrangement_.tile_numel;
  std::int64_t tiles = 0, numel = 0;
  bool states_in_file = false, copy_in_file = false, copy_travels = false;
  for (const auto& group : groups_) {
    if (!group->unit.trainable) continue;
    for (const auto& segment : group->segments()) {
      const bool travels = group->travels(segment);
      if (segment.tier != Tier::File && !travels) continue;
      tiles += (segment.numel + tile - 1) / tile;
      numel = std::max(numel, std::min(tile, segment.numel));
      states_in_file |= segment.tier == Tier::File;
      copy_travels |= travels;
      copy_in_file |= travels && group->rests_in_file();
    }
  }
  const auto copy = numel * rules_.parameter_width;
  std::int64_t bytes = 0;
  if (states_in_file) bytes += (1 + rules_.num_slots) * whole_blocks(numel * kMasterWidth);
  if (copy_travels) bytes += copy_in_file ? whole_blocks(copy) : copy;
  book(Tier::Host, Purpose::Other, std::min(tiles, arrangement_.tiles) * bytes);
}

// --- the ledger -------------------------------------------------------------------------------

void RankMemory::book(Tier tier, Purpose purpose, std::int64_t bytes) {
  const auto t = MemoryReport::index(tier);
  now_[t][MemoryReport::index(purpose)] += bytes;
  if (bytes <= 0) return;
  std::int64_t total = 0;
  for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p) {
    total += std::max<std::int64_t>(0, now_[t][p]);
    peak_[t][p] = std::max(peak_[t][p], now_[t][p]);
  }
  peak_total_[t] = std::max(peak_total_[t], total);
}

void RankMemory::rebook(Purpose from, Purpose to, std::int64_t bytes) {
  now_[MemoryReport::index(Tier::Device)][MemoryReport::index(from)] -= bytes;
  book(Tier::Device, to, bytes);
}

MemoryReport RankMemory::report() const {
  MemoryReport result;
  for (std::size_t t = 0; t < MemoryReport::kTiers; ++t) {
    for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p) {
      result.current_[t][p] = static_cast<std::uint64_t>(std::max<std::int64_t>(0, now_[t][p]));
      result.peak_[t][p] = static_cast<std::uint64_t>(std::max<std::int64_t>(0, peak_[t][p]));
    }
    result.peak_total_[t] = static_cast<std::uint64_t>(peak_total_[t]);
  }
  return result;
}

double RankMemory::most_of_budgets() const {
  const auto& limits = rules_.settings.memory;
  double most = 0;
  for (const auto tier : kTiers) {
    const auto& limit = budget_of(limits, tier);
    if (!limit) continue;
    auto need = peak_total_[MemoryReport::index(tier)];
    if (const auto& placed = arrangement_.by_budgets; !placed->fits)
      need = std::max(need, placed->need.total(tier) + (tier == Tier::Device ? limits.activations.value_or(0) : 0));
    most = std::max(most, static_cast<double>(need) / static_cast<double>(std::max<std::int64_t>(*limit, 1)));
  }
  return most;
}

std::string RankMemory::refusal() const {
  if (auto text = refusal_of(rules_, arrangement_); !text.empty()) return text;
  for (const auto tier : kTiers) {
    const auto& limit = budget_of(rules_.settings.memory, tier);
    const auto peak = peak_total_[MemoryReport::index(tier)];
    if (limit && peak > *limit)
      return base::join("memory.", MemoryReport::name(tier), ": got ", *limit, " bytes, expected at least ", peak,
                        ", which a step takes at its peak. Hint: ",
                        tier == Tier::Device
                            ? "leave more room for activations with memory.activations, take a smaller "
                              "micro-batch, or checkpoint activations."
                            : "a larger budget.");
  }
  return "";
}

void RankMemory::reset_peak() {
  gathers_->trim();
  reductions_->trim();
  if (blocks_) blocks_->trim();
  for (std::size_t t = 0; t < MemoryReport::kTiers; ++t) {
    peak_total_[t] = 0;
    for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p) {
      peak_[t][p] = now_[t][p];
      peak_total_[t] += std::max<std::int64_t>(0, now_[t][p]);
    }
  }
}

// --- a micro-batch ----------------------------------------------------------------------------

void RankMemory::use(std::span<const std::size_t> parameters) {
  if (rules_.settings.zero.stage < 3) return;
  std::vector<int> groups;
  for (const auto i : parameters) {
    const auto g = static_cast<int>(member_of_.at(i).first);
    if (std::find(groups.begin(), groups.end(), g) == groups.end()) groups.push_back(g);
  }
  gathering_->use(groups.data(), static_cast<int>(groups.size()), /*training=*/true);
}

void RankMemory::begin_backward() {
  first_ = micro_step_ == 0;
  boundary_ = micro_step_ + 1 == rules_.accumulation;
  for (const auto& group : groups_) {
    std::fill(group->taken.begin(), group->taken.end(), 0);
    group->awaited = group->unit.trainable ? group->unit.parameters.size() : 0;
  }
  reduce_next_ = 0;
  in_flight_.clear();
  gathering_->begin_backward();
  in_backward_ = true;
  if (blocks_) blocks_->open = true;
}

RankMemory::Booked RankMemory::readable(const Booked& gradient, std::int64_t numel) {
  if (rules_.wire_width == rules_.parameter_width && gradient->pooled()) return gradient;
  return blocks_->take(numel * rules_.wire_width);
}

void RankMemory::gradient(std::size_t parameter, Tensor tensor) {
  auto gradient = std::static_pointer_cast<Block>(std::move(tensor));
  const auto [g, i] = member_of_.at(parameter);
  auto& group = *groups_[g];
  if (!group.unit.trainable) return;
  const auto numel = group.unit.layout.parameter_numel(i);
  const bool again = std::exchange(group.taken[i], 1) != 0;
  if (rules_.direct_gradients) {
    if (group.kept[i]) {
      gradient.reset();  // added in place to what is there
    } else if (blocks_) {
      group.kept[i] = readable(gradient, numel);
    } else {
      if (rules_.around.gpu)
        book(Tier::Device, Purpose::Gradients, gradient->bytes());
      else
        rebook(Purpose::Activations, Purpose::Gradients, gradient->bytes());
      group.rebooked[i] = 1;
      group.kept[i] = std::move(gradient);
    }
  } else if (blocks_ && config::shards_gradients(rules_.settings.zero.stage)) {
    auto data = readable(gradient, numel);
    if (!group.kept[i]) group.kept[i] = std::move(data);
  } else if (config::shards_gradients(rules_.settings.zero.stage) && group.input == 0) {
    group.input = reductions_->take(group.unit.padded_numel() * rules_.wire_width);
  }
  gradient.reset();
  if (again) return;
  if (--group.awaited == 0) reduce_ready_groups();
}

void RankMemory::reduce_ready_groups() {
  while (reduce_next_ < reduce_order_.size() && reduce_order_[reduce_next_]->awaited == 0) {
    auto* group = reduce_order_[reduce_next_++];
    finish_reductions(
        config::reductions_beside(rules_.settings.zero.stage, blocks_ != nullptr, rules_.overlap, in_flight_.size()));
    begin_reduce(*group);
    in_flight_.push_back(group);
  }
}

void RankMemory::finish_reductions(std::size_t most_in_flight) {
  while (in_flight_.size() > most_in_flight) {
    finish_reduce(*in_flight_.front());
    in_flight_.erase(in_flight_.begin());
  }
}

void RankMemory::begin_reduce(Group& group) {
  if (!group.unit.trainable || group.unit.padded_numel() == 0) return;
  const bool sharded = config::shards_gradients(rules_.settings.zero.stage);
  const bool straight = first_ && rules_.gradient_width == rules_.wire_width;
  const auto shard = group.unit.shard_numel() * rules_.wire_width;
  const auto count = [&] {
    const bool to_all = !config::shards_optimizer(rules_.settings.zero.stage);
    moved_.reduced +=
        rules_.gradient_bits > 0
            ? (rules_.around.world - 1) * base::quantized_bytes(group.unit.shard_numel(), rules_.gradient_bits)
            : rules_.share(group.unit.padded_numel() * rules_.wire_width) * (to_all ? 2 : 1);
    moved_.collectives += to_all ? 2 : 1;
  };
  if (blocks_ && (rules_.direct_gradients ? boundary_ : sharded)) {
    if (sharded && !straight) group.output = reductions_->take(shard);
    return count();
  }
  if (rules_.direct_gradients) return;
  if (sharded) {
    if (!straight) group.output = reductions_->take(shard);
  } else {
    if (!boundary_) return;
    if (rules_.gradient_width != rules_.wire_width)
      group.input = reductions_->take(group.unit.padded_numel() * rules_.wire_width);
  }
  count();
}

void RankMemory::finish_reduce(Group& group) {
  if (group.output != 0) reductions_->put(std::exchange(group.output, 0));
  if (group.input != 0) reductions_->put(std::exchange(group.input, 0));
  if (!rules_.direct_gradients)
    for (auto& gradient : group.kept) gradient.reset();
  if (boundary_ && group.offloads() && rules_.around.gpu)
    moved_.to_host += group.unit.shard_numel() * rules_.gradient_width;
  // Copied to host memory, and gone.
  if (boundary_ && rules_.direct_gradients && group.offloads()) drop_gradients(group);
}

void RankMemory::end_backward() {
  in_backward_ = false;
  if (blocks_) blocks_->open = false;
  finish_reductions(0);
  gathering_->end_pass();
  ++micro_step_;
}

void RankMemory::drop_gradients(Group& group) {
  for (std::size_t i = 0; i < group.kept.size(); ++i) {
    if (!group.kept[i]) continue;
    if (std::exchange(group.rebooked[i], 0)) {
      if (rules_.around.gpu)
        book(Tier::Device, Purpose::Gradients, -group.kept[i]->bytes());
      else
        rebook(Purpose::Gradients, Purpose::Activations, group.kept[i]->bytes());
    }
    group.kept[i].reset();
  }
}

void RankMemory::drop_gradients() {
  for (const auto& group : groups_) drop_gradients(*group);
}

// The update: states of files come and go, new parameters go to where they rest and to the other ranks.
void RankMemory::count_update(const Group& group) {
  if (!group.unit.trainable) return;
  for (const auto& segment : group.segments()) {
    moved_.updated += segment.numel;
    if (segment.tier != Tier::Device) moved_.updated_on_host += segment.numel;
    const auto states = (1 + rules_.num_slots) * kMasterWidth * segment.numel;
    const auto copy = rules_.parameter_width * segment.numel;
    if (segment.tier == Tier::File) moved_.read += states, moved_.written += states;
    if (!group.travels(segment)) continue;
    (group.rests_in_file() ? moved_.written : moved_.from_host) += copy;
  }
  if (!config::publishes_parameters(rules_.settings.zero.stage, group.place.sharded, rules_.around.world)) return;
  moved_.gathered += rules_.share(group.gathered_bytes());
  ++moved_.collectives;
}

void RankMemory::step() {
  micro_step_ = 0;
  gathering_->end_pass();
  for (const auto& group : groups_) {
    count_update(*group);
    group->second_kept = false;
  }
  drop_gradients();
  gathering_->fetch_first();
}

}  // namespace zero::planning
