// See tier_plan.h.
#include "engine/tier_plan.h"

#include <algorithm>

#include "base/check.h"
#include "base/log.h"
#include "config/document.h"
#include "config/tier_rules.h"
#include "offload/storage_file.h"

namespace zero::engine {

// What counts ahead of the files counts by the same blocks.
static_assert(offload::ShardFile::kAlignment == config::kFileBlock);

namespace {

using config::OffloadDevice;
using memory::Tier;

offload::IoSettings io_settings(const config::AioSettings& aio) {
  return {.block_size = aio.block_size,
          .queue_depth = aio.queue_depth,
          .threads = aio.threads,
          .single_submit = aio.single_submit,
          .overlap_events = aio.overlap_events};
}

}  // namespace

TierPlan::TierPlan(const Options& options, at::Device device, const Communicator& comm)
    : options_(options), settings_(options_.settings()), device_(device), rank_(comm.rank()), world_(comm.size()) {
  check_device();
}

void TierPlan::check_device() const {
  if (device_.is_cpu()) return;
  const auto& optimizer = settings_.zero.offload_optimizer;
  const bool offloads = settings_.zero.stage >= 1 && optimizer.device != OffloadDevice::None && optimizer.ratio > 0;
  if (offloads && optimizer.ratio < 1)
    throw ConfigError(base::join("[Engine] zero_optimization.offload_optimizer.ratio: got ", optimizer.ratio,
                                 " with parameters on a GPU, expected 1 or 0 (rank ", rank_, "/", world_,
                                 "). Hint: a part of the states can stay behind on CPUs only."));
  // A GPU's kernels cannot write to where a file reads from.
  if (settings_.zero.stage == 3 && settings_.zero.offload_param.device == OffloadDevice::Nvme && !offloads)
    throw ConfigError(
        base::join("[Engine] zero_optimization.offload_param.device: got \"nvme\" with the optimizer "
                   "on a GPU, expected offload_optimizer.device cpu or nvme beside it (rank ",
                   rank_, "/", world_, ")."));
}

memory::Budgets TierPlan::budgets() const {
  const auto& m = settings_.memory;
  return {.device = m.device, .host = m.host, .file = m.file, .activations = m.activations.value_or(0)};
}

// By offload_param: a shard rests in host memory as long as the elements allowed there last (max_in_cpu), then in the
// file.
Tier TierPlan::parameter_tier(std::int64_t shard) {
  const auto& param = settings_.zero.offload_param;
  if (settings_.zero.stage != 3 || param.device == OffloadDevice::None) return Tier::Device;
  if (param.device == OffloadDevice::Nvme && in_host_ + shard > param.max_in_cpu) return Tier::File;
  in_host_ += shard;
  return Tier::Host;
}

void TierPlan::arrange(memory::FootprintRules rules, const std::vector<memory::GroupSize>& groups,
                       const std::vector<std::string>& names) {
  const auto& zero = settings_.zero;
  const auto optimizer_tier = zero.stage == 0 || zero.offload_optimizer.device == OffloadDevice::None ? Tier::Device
                              : zero.offload_optimizer.device == OffloadDevice::Cpu                   ? Tier::Host
                                                                                                      : Tier::File;
  for (const auto& group : groups)
    places_.push_back(
        {.parameters = group.persistent ? Tier::Device : parameter_tier((group.numel + world_ - 1) / world_),
         .optimizer = optimizer_tier});
  rules.ratio = zero.offload_optimizer.ratio;
  rules.delayed = zero.delayed_update && offloads();
  const auto policy = update_policy(rules.num_slots);
  rules.tile_numel = policy.tile_numel;
  rules.tiles = policy.tiles;
  rules.checksums = settings_.aio.checksums;
  const auto limits = budgets();
  rules.fetch_ahead = config::shards_fetched_ahead(zero.offload_param.buffer_count);
  if (limits.device || limits.host || limits.file) {
    const auto& document = options_.document();
    const memory::Movable movable{
        .optimizer = zero.stage >= 1 && !document.is_set("zero_optimization.offload_optimizer.device"),
        .parameters = zero.stage == 3 && !document.is_set("zero_optimization.offload_param.device"),
        .together = !device_.is_cpu()};
    auto placement = memory::place(rules, groups, std::move(places_), movable, limits);
    if (!placement.fits) refuse(placement, limits);
    if (rank_ == 0) base::log(LogLevel::Info, memory::describe(placement, limits, groups, names));
    places_ = std::move(placement.places);
  }
  const auto rests_in_file = [&](Tier memory::GroupPlace::*what) {
    return std::any_of(places_.begin(), places_.end(), [&](const auto& place) { return place.*what == Tier::File; });
  };
  const auto file_in = [&](const std::string& configured) {
    return std::make_unique<offload::ShardFile>(configured.empty() ? settings_.memory.path : configured,
                                                io_settings(settings_.aio), base::join("rank ", rank_, "/", world_),
                                                settings_.aio.checksums);
  };
  if (rests_in_file(&memory::GroupPlace::optimizer) && rules.ratio > 0)
    optimizer_file_ = file_in(zero.offload_optimizer.path);
  if (zero.stage == 3 && rests_in_file(&memory::GroupPlace::parameters))
    parameter_file_ = file_in(zero.offload_param.path);
}

void TierPlan::refuse(const memory::Placement& placement, const memory::Budgets& limits) const {
  std::string over, helps;
  for (const auto tier : {Tier::Device, Tier::Host, Tier::File}) {
    const auto& limit = limits.of(tier);
    const auto name = base::join("memory.", MemoryReport::name(tier));
    const auto need = placement.need.total(tier) + (tier == Tier::Device ? limits.activations : 0);
    if (limit && need > *limit)
      over += base::join(over.empty() ? "" : "; ", name, ": got ", *limit, " bytes, expected at least ", need,
                         " with everything moved off it that may move");
    if (const auto& smallest = placement.smallest[MemoryReport::index(tier)])
      helps += base::join(helps.empty() ? "" : ", or ", name, " = ", *smallest);
  }
  if (limits.host && !limits.file && settings_.zero.stage >= 1)
    helps += base::join(helps.empty() ? "" : ", or ",
                        "memory.file with memory.nvme_path, so that states can move to a file");
  if (settings_.zero.stage < 3) helps += base::join(helps.empty() ? "" : ", or ", "a higher stage");
  if (2 * limits.activations > placement.need.total(Tier::Device))
    helps += base::join(helps.empty() ? "" : ", or ", "fewer activations, ", limits.activations,
                        " bytes of the device's (a smaller micro-batch, activation_checkpointing)");
  throw ConfigError(
      base::join("[Engine] ", over, " (rank ", rank_, "/", world_, "). Hint: the smallest budget that works is ",
                 helps.empty() ? "larger in more than one tier" : helps, "."),
      ExitCode::kOutOfMemory);
}

bool TierPlan::offloads() const {
  return settings_.zero.offload_optimizer.ratio > 0 &&
         std::any_of(places_.begin(), places_.end(), [](const auto& place) { return place.optimizer != Tier::Device; });
}

void TierPlan::describe(GroupContext& context, std::size_t group) const {
  context.places = {.optimizer = places_[group].optimizer,
                    .ratio = settings_.zero.offload_optimizer.ratio,
                    .optimizer_file = optimizer_file_.get(),
                    .pinned = !device_.is_cpu() && settings_.zero.offload_optimizer.pin_memory};
  context.parameter_tier = places_[group].parameters;
  context.parameter_file = parameter_file_.get();
  context.checks_files = settings_.aio.checksums;
  context.delayed = settings_.zero.delayed_update && offloads();
}

void TierPlan::make_files(const std::vector<std::unique_ptr<ParamGroup>>& groups) {
  const auto& param = settings_.zero.offload_param;
  for (const auto& group : groups)
    if (param.buffer_size && group->parameters().in_file() && group->parameters().numel() > *param.buffer_size)
      throw ConfigError(base::join("[Engine] zero_optimization.offload_param.buffer_size: got ", *param.buffer_size,
                                   " elements, expected at least ", group->parameters().numel(),
                                   ", the shard of group ", group->name(), " (rank ", rank_, "/", world_,
                                   "). Hint: \"auto\" takes what is needed."));
  const auto make = [&](offload::ShardFile* file, const char* what) {
    if (file == nullptr) return;
    file->make();
    if (rank_ != 0) return;
    base::log(LogLevel::Info, base::join(what, " rest in ", file->file().path(), ": ", file->bytes(),
                                         " bytes a rank, by ", file->file().description()));
    if (const auto notice = offload::folder_notice(file->folder()); !notice.empty())
      base::log(LogLevel::Warning, notice);
  };
  make(optimizer_file_.get(), "optimizer states");
  make(parameter_file_.get(), "parameters");
}

void TierPlan::enforce(memory::MemoryLedger& ledger) const {
  const auto limits = budgets();
  for (const auto tier : {Tier::Device, Tier::Host, Tier::File})
    if (const auto& limit = limits.of(tier))
      ledger.limit(tier, *limit, base::join("memory.", MemoryReport::name(tier)),
                   base::join("rank ", rank_, "/", world_));
}

StagedUpdate::Policy TierPlan::update_policy(int num_slots) const {
  const auto& optimizer = settings_.zero.offload_optimizer;
  auto limit = settings_.zero.sub_group_size;
  if (optimizer.buffer_size) limit = std::min(limit, *optimizer.buffer_size);
  return {.tile_numel = StagedUpdate::tile_for(limit),
          .tiles = static_cast<int>(config::tiles_at_once(optimizer.buffer_count, num_slots)),
          .read_ahead = optimizer.pipeline_read,
          .write_behind = optimizer.pipeline_write};
}

int TierPlan::fetch_ahead() const {
  if (!parameter_file_) return 0;
  return config::shards_fetched_ahead(settings_.zero.offload_param.buffer_count);
}

}  // namespace zero::engine
