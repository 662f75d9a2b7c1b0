// See tier_plan.h.
#include "engine/tier_plan.h"

#include <algorithm>

#include "base/check.h"
#include "base/log.h"
#include "config/document.h"
#include "step/placement.h"
#include "step/tiers.h"
#include "storage/storage_file.h"

namespace zero::engine {

// What counts ahead of the files counts by the same blocks.
static_assert(engine::ShardFile::kAlignment == step::kFileBlock);

namespace {

using config::OffloadDevice;
using step::Tier;

storage::IoSettings io_settings(const config::AioSettings& aio) {
  return {.block_size = aio.block_size,
          .queue_depth = aio.queue_depth,
          .threads = aio.threads,
          .single_submit = aio.single_submit,
          .overlap_events = aio.overlap_events};
}

}  // namespace

TierPlan::TierPlan(const Options& options, at::Device device, const comm::Group& comm)
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

void TierPlan::arrange(const step::RunTopology& topology, std::int64_t accumulation,
                       const std::vector<step::Unit>& units) {
  const auto run = step::run_facts(settings_, topology, accumulation);
  const auto& document = options_.document();
  const auto freedom =
      step::placement_freedom(run.sharding, run.topology.gpu, [&](const char* key) { return document.is_set(key); });
  const step::PlacementTask task{run, settings_, units, freedom};
  auto plan = step::place(task);
  if (!plan.fits)
    throw ConfigError("[Engine] " + step::refusal(task, plan, base::join("rank ", rank_, "/", world_)),
                      ExitCode::kOutOfMemory);
  if (plan.need && rank_ == 0) base::log(LogLevel::Info, step::describe(task, plan));
  placements_ = std::move(plan.placements);
  const auto rests_in_file = [&](Tier step::Placement::*what) {
    return std::any_of(placements_.begin(), placements_.end(),
                       [&](const auto& placement) { return placement.*what == Tier::File; });
  };
  const auto file_in = [&](const std::string& configured) {
    return std::make_unique<engine::ShardFile>(configured.empty() ? settings_.memory.path : configured,
                                               io_settings(settings_.aio), base::join("rank ", rank_, "/", world_),
                                               settings_.aio.checksums);
  };
  const auto& zero = settings_.zero;
  if (rests_in_file(&step::Placement::optimizer) && zero.offload_optimizer.ratio > 0)
    optimizer_file_ = file_in(zero.offload_optimizer.path);
  if (rests_in_file(&step::Placement::params)) parameter_file_ = file_in(zero.offload_param.path);
}

bool TierPlan::offloads() const {
  return settings_.zero.offload_optimizer.ratio > 0 &&
         std::any_of(placements_.begin(), placements_.end(),
                     [](const auto& placement) { return placement.optimizer != Tier::Device; });
}

void TierPlan::describe(GroupContext& context, std::size_t group) const {
  context.places = {.optimizer = placements_[group].optimizer,
                    .ratio = settings_.zero.offload_optimizer.ratio,
                    .optimizer_file = optimizer_file_.get(),
                    .pinned = !device_.is_cpu() && settings_.zero.offload_optimizer.pin_memory};
  context.parameter_tier = placements_[group].params;
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
  const auto make = [&](engine::ShardFile* file, const char* what) {
    if (file == nullptr) return;
    file->make();
    if (rank_ != 0) return;
    base::log(LogLevel::Info, base::join(what, " rest in ", file->file().path(), ": ", file->bytes(),
                                         " bytes a rank, by ", file->file().description()));
    if (const auto notice = storage::folder_notice(file->folder()); !notice.empty())
      base::log(LogLevel::Warning, notice);
  };
  make(optimizer_file_.get(), "optimizer states");
  make(parameter_file_.get(), "parameters");
}

void TierPlan::enforce(step::MemoryLedger& ledger) const {
  const auto budgets = step::Budgets::of(settings_.memory);
  for (const auto tier : step::kTiers)
    if (const auto& budget = budgets.of(tier))
      ledger.limit(tier, *budget, base::join("memory.", MemoryReport::name(tier)),
                   base::join("rank ", rank_, "/", world_));
}

StagedUpdate::Policy TierPlan::update_policy(int num_slots) const {
  const auto& optimizer = settings_.zero.offload_optimizer;
  auto limit = settings_.zero.sub_group_size;
  if (optimizer.buffer_size) limit = std::min(limit, *optimizer.buffer_size);
  return {.tile_numel = StagedUpdate::tile_for(limit),
          .tiles = static_cast<int>(step::tiles_at_once(optimizer.buffer_count, num_slots)),
          .read_ahead = optimizer.pipeline_read,
          .write_behind = optimizer.pipeline_write};
}

int TierPlan::fetch_ahead() const {
  if (!parameter_file_) return 0;
  return step::shards_fetched_ahead(settings_.zero.offload_param.buffer_count);
}

}  // namespace zero::engine
