// See rank_memory.h.
#include "plan/rank_memory.h"

#include <algorithm>
#include <utility>

#include "config/stage_rules.h"
#include "config/tier_rules.h"
#include "memory/prefetcher.h"

namespace zero::planning {
namespace {

using config::OffloadDevice;
using Residency = memory::GatherUnit::Residency;

using config::kMasterWidth;
using config::whole_blocks;

}  // namespace

// --- what decides -----------------------------------------------------------------------------

int Holder::gradient_width() const {
  return width(settings.grad_accum_dtype.value_or(accumulation > 1 ? config::Precision::Fp32 : settings.precision));
}

int Holder::num_slots() const {
  using config::OptimizerType;
  switch (settings.optimizer.type) {
    case OptimizerType::Sgd: return settings.optimizer.momentum != 0 ? 1 : 0;
    case OptimizerType::Adagrad:
    case OptimizerType::Lion: return 1;
    default: return 2;
  }
}

bool Holder::one_dtype() const {
  const auto parameter = settings.precision;
  return settings.grad_accum_dtype.value_or(accumulation > 1 ? config::Precision::Fp32 : parameter) == parameter &&
         settings.communication_dtype.value_or(parameter) == parameter;
}

bool Holder::reads_gradients() const {
  return !gpu && in_place && world > 1 && (config::shards_gradients(settings.zero.stage) || one_dtype());
}

bool Holder::direct_gradients() const {
  if (!one_dtype()) return false;
  if (world > 1) return reads_gradients() && !config::shards_gradients(settings.zero.stage);
  const double ahead = settings.prescale_gradients ? 1.0 : settings.predivide_factor;
  return settings.reduce_op != config::ReduceOp::Mean || static_cast<float>(1.0 / ahead) == 1.0f;
}

bool Holder::delayed() const {
  const auto& zero = settings.zero;
  return zero.delayed_update && zero.stage >= 1 && zero.offload_optimizer.device != OffloadDevice::None &&
         zero.offload_optimizer.ratio > 0;
}

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
  Tensor take(std::int64_t bytes) {
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
  if (blocks_ && in_backward_ && blocks_->serves(bytes + config::kReadableOverhead)) return blocks_->take(bytes + config::kReadableOverhead);
  book(Tier::Device, Purpose::Activations, bytes);
  return std::make_shared<Block>(*this, bytes, /*pooled=*/false);
}

// --- a unit -----------------------------------------------------------------------------------

struct RankMemory::Group final : memory::GatherUnit {
  Group(RankMemory& memory, const Unit& of) : memory(memory), unit(of) {}

  const std::string& name() const override { return unit.name; }
  bool root() const override { return unit.root; }
  std::int64_t padded_numel() const override { return unit.padded_numel(); }
  bool rests_sharded() const override { return sharded; }
  bool rests_in_file() const override { return sharded && parameters == Tier::File; }
  bool gathers_in_place() const override { return mapped; }
  Residency residency() const override { return now; }

  std::int64_t resting_bytes() const {
    return (sharded ? unit.shard_numel() : unit.padded_numel()) * memory.holder_.parameter_width();
  }
  std::int64_t owned() const {
    return config::shards_optimizer(memory.holder_.settings.zero.stage) ? unit.shard_numel() : unit.padded_numel();
  }
  bool offloads() const {
    return unit.trainable && optimizer != Tier::Device && memory.holder_.settings.zero.offload_optimizer.ratio > 0;
  }
  // Of the owned elements, those whose states are offloaded.
  std::int64_t moved() const {
    return offloads() ? config::moved_numel(owned(), memory.holder_.settings.zero.offload_optimizer.ratio) : 0;
  }

  void begin_fetch() override {
    if (!rests_in_file() || now != Residency::Sharded || fetched > 0 || unit.shard_numel() == 0) return;
    fetched = whole_blocks(resting_bytes());
    memory.moved_.read += fetched;
    memory.book(Tier::Host, Purpose::GatherBuffers, fetched);
  }
  void cancel_fetch() override { memory.book(Tier::Host, Purpose::GatherBuffers, -std::exchange(fetched, 0)); }
  void begin_gather() override {
    begin_fetch();
    buffer = memory.gathers_->take(unit.padded_numel() * memory.holder_.parameter_width());
    if (memory.holder_.gpu && parameters != Tier::Device) memory.moved_.from_host += resting_bytes();
    count_gather();
    now = Residency::Gathering;
  }
  void finish_gather() override {
    if (now == Residency::Gathered) return;
    if (mapped) {
      count_gather();
    } else {
      if (now == Residency::Sharded) begin_gather();
      cancel_fetch();
    }
    now = Residency::Gathered;
  }
  void count_gather() {
    memory.moved_.gathered += memory.share(unit.padded_numel() * memory.holder_.parameter_width());
    ++memory.moved_.collectives;
  }
  void gather_copy() override { finish_gather(); }
  void release() override {
    if (!sharded || now == Residency::Sharded) return;
    if (now == Residency::Gathering) cancel_fetch();
    if (buffer != 0) memory.gathers_->put(std::exchange(buffer, 0));
    now = Residency::Sharded;
  }

  RankMemory& memory;
  const Unit& unit;
  Tier parameters = Tier::Device, optimizer = Tier::Device;
  bool sharded = false, mapped = false;
  Residency now = Residency::Gathered;
  std::int64_t fetched = 0;
  int buffer = 0;  // of the gather pool

  // Gradients of a micro-batch.
  std::size_t awaited = 0;
  std::vector<char> taken;
  std::vector<Tensor> kept;       // autograd's own, or those on their way to the other ranks
  std::vector<char> rebooked;     // of kept: counted as gradients
  int input = 0, output = 0;      // of the reduce pool
};

class RankMemory::Gathering {
 public:
  Gathering(const std::vector<std::unique_ptr<Group>>& groups, const config::ZeroSettings& zero) : groups_(groups) {
    std::vector<memory::GatherUnit*> all;
    bool in_files = false;
    for (const auto& group : groups) {
      all.push_back(group.get());
      in_files |= group->rests_in_file();
    }
    prefetcher_ = std::make_unique<memory::Prefetcher>(
        std::move(all),
        memory::Prefetcher::Policy{.ahead = zero.prefetch_bucket_size,
                                   .max_live = zero.max_live_parameters,
                                   .max_reuse = zero.max_reuse_distance,
                                   .fetch_ahead = in_files ? config::shards_fetched_ahead(zero.offload_param.buffer_count) : 0},
        [](const std::string&) {});
  }
  memory::Prefetcher* operator->() { return prefetcher_.get(); }

 private:
  const std::vector<std::unique_ptr<Group>>& groups_;
  std::unique_ptr<memory::Prefetcher> prefetcher_;
};

// --- at rest ----------------------------------------------------------------------------------

RankMemory::RankMemory(const Holder& holder, const std::vector<Unit>& units, std::int64_t buffer_bytes)
    : holder_(holder),
      gathers_(std::make_unique<Pool>(*this, Purpose::GatherBuffers)),
      reductions_(std::make_unique<Pool>(*this, Purpose::ReduceBuffers)) {
  const auto& zero = holder_.settings.zero;
  if (holder_.reads_gradients())
    blocks_ = std::make_unique<Blocks>(
        *this, config::shards_gradients(zero.stage) ? Purpose::ReduceBuffers : Purpose::Gradients);
  std::size_t num_parameters = 0;
  std::int64_t in_host = 0;  // elements of parameters
  for (const auto& unit : units) {
    num_parameters += unit.parameters.size();
    auto group = std::make_unique<Group>(*this, unit);
    if (zero.stage >= 1 && zero.offload_optimizer.device != OffloadDevice::None)
      group->optimizer = zero.offload_optimizer.device == OffloadDevice::Nvme ? Tier::File : Tier::Host;
    if (zero.stage == 3 && !unit.persistent && zero.offload_param.device != OffloadDevice::None) {
      const auto shard = (unit.numel() + holder_.world - 1) / holder_.world;
      const bool in_file =
          zero.offload_param.device == OffloadDevice::Nvme && in_host + shard > zero.offload_param.max_in_cpu;
      group->parameters = in_file ? Tier::File : Tier::Host;
      if (!in_file) in_host += shard;
    }
    group->sharded = config::shards_parameters(zero.stage, unit.persistent, holder_.world,
                                               group->parameters != Tier::Device);
    if (!group->sharded) group->parameters = Tier::Device;
    group->mapped = group->sharded && !holder_.gpu && holder_.in_place && holder_.world > 1 &&
                    group->parameters != Tier::File &&
                    group->resting_bytes() >= static_cast<std::int64_t>(config::kLeastMappedBytes);
    if (group->sharded) group->now = Residency::Sharded;
    group->taken.resize(unit.parameters.size());
    group->kept.resize(unit.parameters.size());
    group->rebooked.resize(unit.parameters.size());
    book_resting(*group);
    if (blocks_ && unit.trainable && holder_.wire_width() == holder_.parameter_width())
      for (std::size_t i = 0; i < unit.parameters.size(); ++i)
        blocks_->sizes[unit.layout.parameter_numel(i) * holder_.parameter_width() + config::kReadableOverhead] = true;
    groups_.push_back(std::move(group));
  }
  member_of_.resize(num_parameters);
  for (std::size_t g = 0; g < units.size(); ++g)
    for (std::size_t i = 0; i < units[g].parameters.size(); ++i) member_of_.at(units[g].parameters[i]) = {g, i};
  for (const auto g : planning::reduce_order(units)) reduce_order_.push_back(groups_[g].get());
  book_update_tiles();
  book(Tier::Device, Purpose::Other, buffer_bytes);
  gathering_ = std::make_unique<Gathering>(groups_, zero);
}

RankMemory::~RankMemory() { drop_gradients(); }

void RankMemory::book_resting(Group& group) {
  const auto& zero = holder_.settings.zero;
  const auto on = [](Tier tier, std::int64_t bytes) { return tier == Tier::File ? whole_blocks(bytes) : bytes; };
  book(group.parameters, Purpose::Parameters, on(group.parameters, group.resting_bytes()));
  if (group.sharded && !group.mapped && zero.hpz_ranks > 1 && !holder_.in_place && !holder_.gpu && holder_.world > 1)
    book(Tier::Device, Purpose::Parameters,
         group.unit.padded_numel() / zero.hpz_ranks * holder_.parameter_width());  // second shards
  if (!group.unit.trainable) return;
  const bool aliases =
      holder_.parameter_width() == kMasterWidth && group.parameters == Tier::Device && !holder_.delayed();
  const auto moved = group.moved();
  const auto states = [&](Tier tier, std::int64_t numel) {
    if (numel == 0) return;
    const auto bytes = on(tier, numel * kMasterWidth);
    if (tier != Tier::Device || !aliases) book(tier, Purpose::MasterParameters, bytes);
    book(tier, Purpose::OptimizerStates, holder_.num_slots() * bytes);
  };
  states(group.optimizer, moved);
  states(Tier::Device, group.owned() - moved);

  const bool offloads = group.offloads(), sharded = config::shards_gradients(zero.stage);
  const auto shard = group.unit.shard_numel() * holder_.gradient_width();
  const auto next = group.owned() * holder_.parameter_width();
  if (!holder_.direct_gradients()) {
    const bool on_host = offloads && sharded && !holder_.gpu;
    book(on_host ? Tier::Host : Tier::Device, Purpose::Gradients,
         (sharded ? group.unit.shard_numel() : group.unit.padded_numel()) * holder_.gradient_width());
    if (on_host) {
      if (holder_.delayed()) {
        book(Tier::Host, Purpose::Gradients, shard);
        book(Tier::Host, Purpose::Parameters, next);
      }
      return;
    }
  }
  if (!offloads) return;
  book(Tier::Host, Purpose::Gradients, shard * (holder_.delayed() ? 2 : 1));
  if (holder_.delayed()) book(Tier::Host, Purpose::Parameters, next);
}

// As StagedUpdate: buffers of the tiles that are read, updated and written at once.
void RankMemory::book_update_tiles() {
  const auto& optimizer = holder_.settings.zero.offload_optimizer;
  auto limit = holder_.settings.zero.sub_group_size;
  if (optimizer.buffer_size) limit = std::min(limit, *optimizer.buffer_size);
  const auto tile = config::tile_numel(limit);
  const auto most = config::tiles_at_once(optimizer.buffer_count, holder_.num_slots());
  std::int64_t tiles = 0, numel = 0;
  bool states_in_file = false, copy_in_file = false, copy_travels = false;
  for (const auto& group : groups_) {
    if (!group->unit.trainable) continue;
    const auto moved = group->moved();
    const auto segment = [&](Tier tier, std::int64_t count) {
      if (count == 0) return;
      const bool aliases = tier == Tier::Device && holder_.parameter_width() == kMasterWidth &&
                           group->parameters == Tier::Device && !holder_.delayed();
      const bool travels = !aliases && (group->parameters == Tier::File ||
                                        (tier != Tier::Device && holder_.gpu && group->parameters == Tier::Device));
      if (tier != Tier::File && !travels) return;
      tiles += (count + tile - 1) / tile;
      numel = std::max(numel, std::min(tile, count));
      states_in_file |= tier == Tier::File;
      copy_travels |= travels;
      copy_in_file |= travels && group->parameters == Tier::File;
    };
    segment(group->optimizer, moved);
    segment(Tier::Device, group->owned() - moved);
  }
  std::int64_t bytes = 0;
  if (states_in_file) bytes += (1 + holder_.num_slots()) * whole_blocks(numel * kMasterWidth);
  if (copy_travels) bytes += copy_in_file ? whole_blocks(numel * holder_.parameter_width()) : numel * holder_.parameter_width();
  book(Tier::Host, Purpose::Other, std::min(tiles, most) * bytes);
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

void RankMemory::use(std::initializer_list<std::size_t> parameters) {
  if (holder_.settings.zero.stage < 3) return;
  std::vector<int> groups;
  for (const auto i : parameters) {
    const auto g = static_cast<int>(member_of_.at(i).first);
    if (std::find(groups.begin(), groups.end(), g) == groups.end()) groups.push_back(g);
  }
  (*gathering_)->use(groups.data(), static_cast<int>(groups.size()), /*training=*/true);
}

void RankMemory::begin_backward() {
  first_ = micro_step_ == 0;
  boundary_ = micro_step_ + 1 == holder_.accumulation;
  for (const auto& group : groups_) {
    std::fill(group->taken.begin(), group->taken.end(), 0);
    group->awaited = group->unit.trainable ? group->unit.parameters.size() : 0;
  }
  reduce_next_ = 0;
  in_flight_.clear();
  (*gathering_)->begin_backward();
  in_backward_ = true;
  if (blocks_) blocks_->open = true;
}

Tensor RankMemory::readable(const Tensor& gradient, std::int64_t numel) {
  if (holder_.wire_width() == holder_.parameter_width() && gradient->pooled()) return gradient;
  return blocks_->take(numel * holder_.wire_width());
}

void RankMemory::gradient(std::size_t parameter, Tensor gradient) {
  const auto [g, i] = member_of_.at(parameter);
  auto& group = *groups_[g];
  if (!group.unit.trainable) return;
  const auto numel = group.unit.layout.parameter_numel(i);
  const bool again = std::exchange(group.taken[i], 1) != 0;
  if (holder_.direct_gradients()) {
    if (group.kept[i]) {
      gradient.reset();  // added in place to what is there
    } else if (blocks_) {
      group.kept[i] = readable(gradient, numel);
    } else {
      if (holder_.gpu)
        book(Tier::Device, Purpose::Gradients, gradient->bytes());
      else
        rebook(Purpose::Activations, Purpose::Gradients, gradient->bytes());
      group.rebooked[i] = 1;
      group.kept[i] = std::move(gradient);
    }
  } else if (blocks_ && config::shards_gradients(holder_.settings.zero.stage)) {
    auto data = readable(gradient, numel);
    if (!group.kept[i]) group.kept[i] = std::move(data);
  } else if (config::shards_gradients(holder_.settings.zero.stage) && group.input == 0) {
    group.input = reductions_->take(group.unit.padded_numel() * holder_.wire_width());
  }
  gradient.reset();
  if (again) return;
  if (--group.awaited == 0) reduce_ready_groups();
}

void RankMemory::reduce_ready_groups() {
  const auto& zero = holder_.settings.zero;
  const bool overlap = zero.overlap_comm.value_or(zero.stage == 3 || blocks_ != nullptr);
  while (reduce_next_ < reduce_order_.size() && reduce_order_[reduce_next_]->awaited == 0) {
    auto* group = reduce_order_[reduce_next_++];
    finish_reductions(config::reductions_beside(zero.stage, blocks_ != nullptr, overlap, in_flight_.size()));
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
  const bool sharded = config::shards_gradients(holder_.settings.zero.stage);
  const bool straight = first_ && holder_.gradient_width() == holder_.wire_width();
  const auto shard = group.unit.shard_numel() * holder_.wire_width();
  const auto count = [&] {
    const bool to_all = !config::shards_optimizer(holder_.settings.zero.stage);
    moved_.reduced += share(group.unit.padded_numel() * holder_.wire_width()) * (to_all ? 2 : 1);
    moved_.collectives += to_all ? 2 : 1;
  };
  if (blocks_ && (holder_.direct_gradients() ? boundary_ : sharded)) {
    if (sharded && !straight) group.output = reductions_->take(shard);
    return count();
  }
  if (holder_.direct_gradients()) return;
  if (sharded) {
    if (!straight) group.output = reductions_->take(shard);
  } else {
    if (!boundary_) return;
    if (holder_.gradient_width() != holder_.wire_width())
      group.input = reductions_->take(group.unit.padded_numel() * holder_.wire_width());
  }
  count();
}

void RankMemory::finish_reduce(Group& group) {
  if (group.output != 0) reductions_->put(std::exchange(group.output, 0));
  if (group.input != 0) reductions_->put(std::exchange(group.input, 0));
  if (!holder_.direct_gradients())
    for (auto& gradient : group.kept) gradient.reset();
  if (boundary_ && group.offloads() && holder_.gpu) moved_.to_host += group.unit.shard_numel() * holder_.gradient_width();
  // Copied to host memory, and gone.
  if (boundary_ && holder_.direct_gradients() && group.offloads()) drop_gradients(group);
}

void RankMemory::end_backward() {
  in_backward_ = false;
  if (blocks_) blocks_->open = false;
  finish_reductions(0);
  (*gathering_)->end_pass();
  ++micro_step_;
}

void RankMemory::drop_gradients(Group& group) {
  for (std::size_t i = 0; i < group.kept.size(); ++i) {
    if (!group.kept[i]) continue;
    if (std::exchange(group.rebooked[i], 0)) {
      if (holder_.gpu)
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
  const auto moved = group.moved();
  if (group.optimizer == Tier::File) {
    moved_.read += (1 + holder_.num_slots()) * kMasterWidth * moved;
    moved_.written += (1 + holder_.num_slots()) * kMasterWidth * moved;
  }
  if (group.rests_in_file())
    moved_.written += group.owned() * holder_.parameter_width();
  else if (holder_.gpu && group.parameters == Tier::Device)
    moved_.from_host += moved * holder_.parameter_width();
  if (!config::publishes_parameters(holder_.settings.zero.stage, group.sharded, holder_.world)) return;
  moved_.gathered += share(group.unit.padded_numel() * holder_.parameter_width());
  ++moved_.collectives;
}

void RankMemory::step() {
  micro_step_ = 0;
  (*gathering_)->end_pass();
  for (const auto& group : groups_) count_update(*group);
  drop_gradients();
  (*gathering_)->fetch_first();
}

}  // namespace zero::planning
