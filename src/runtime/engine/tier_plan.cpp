// See tier_plan.h.
#include "engine/tier_plan.h"

#include <algorithm>

#include "base/check.h"
#include "base/log.h"
#include "config/document.h"
#include "step/tiers.h"
#include "storage/storage_file.h"

namespace zero::engine {

// The step program counts files in the same blocks.
static_assert(engine::ShardFile::kAlignment == step::kFileBlock);

namespace {

using config::OffloadDevice;
using step::Tier;

}  // namespace

storage::IoSettings io_settings(const config::AioSettings& aio) {
  return {.block_size = aio.block_size,
          .queue_depth = aio.queue_depth,
          .threads = aio.threads,
          .single_submit = aio.single_submit,
          .overlap_events = aio.overlap_events};
}

TierPlan::TierPlan(const Job& job, const step::RunFacts& run, std::vector<step::Unit> units)
    : job_(job), settings_(job.settings), run_(run), units_(std::move(units)) {
  check_device();
  place();
  const auto rests_in_file = [&](Tier step::Placement::*what) {
    return std::any_of(placements_.begin(), placements_.end(),
                       [&](const auto& placement) { return placement.*what == Tier::File; });
  };
  const auto& zero = settings_.zero;
  if (rests_in_file(&step::Placement::optimizer) && zero.offload_optimizer.ratio > 0)
    states_file_ = file_in(zero.offload_optimizer.path);
  if (rests_in_file(&step::Placement::params)) params_file_ = file_in(zero.offload_param.path);
}

std::string TierPlan::who() const { return base::join("rank ", job_.comm->rank(), "/", job_.comm->size()); }

std::shared_ptr<ShardFile> TierPlan::file_in(const std::string& configured) const {
  return std::make_shared<ShardFile>(configured.empty() ? settings_.memory.path : configured,
                                     io_settings(settings_.aio), who(), settings_.aio.checksums);
}

void TierPlan::check_device() const {
  if (!run_.topology.gpu) return;
  const auto& optimizer = settings_.zero.offload_optimizer;
  const bool offloads = run_.sharding.optimizer && optimizer.device != OffloadDevice::None && optimizer.ratio > 0;
  if (offloads && optimizer.ratio < 1)
    throw ConfigError(base::join("[Engine] zero_optimization.offload_optimizer.ratio: got ", optimizer.ratio,
                                 " with parameters on a GPU, expected 1 or 0 (", who(),
                                 "). Hint: a part of the states can stay behind on CPUs only."));
  // GPU kernels cannot write to the host buffers that files are read into.
  if (run_.sharding.params && settings_.zero.offload_param.device == OffloadDevice::Nvme && !offloads)
    throw ConfigError(
        base::join("[Engine] zero_optimization.offload_param.device: got \"nvme\" with the optimizer "
                   "on a GPU, expected offload_optimizer.device cpu or nvme as well (",
                   who(), ")."));
}

void TierPlan::place() {
  const auto& document = job_.options.document();
  const auto freedom =
      step::placement_freedom(run_.sharding, run_.topology.gpu, [&](const char* key) { return document.is_set(key); });
  const step::PlacementTask task{run_, settings_, units_, freedom};
  auto plan = step::place(task);
  if (!plan.fits) throw ConfigError("[Engine] " + step::refusal(task, plan, who()), ExitCode::kOutOfMemory);
  if (plan.need && job_.comm->rank() == 0) base::log(LogLevel::Info, step::describe(task, plan));
  placements_ = std::move(plan.placements);
}

bool TierPlan::offloads() const {
  return settings_.zero.offload_optimizer.ratio > 0 &&
         std::any_of(placements_.begin(), placements_.end(),
                     [](const auto& placement) { return placement.optimizer != Tier::Device; });
}

step::GroupFacts TierPlan::trained_facts(std::size_t unit) const {
  auto units = units_;
  units[unit].trainable = true;
  return step::group_facts(run_, settings_, units, placements_)[unit];
}

void TierPlan::check_buffers(const std::vector<step::GroupFacts>& groups) const {
  const auto& size = settings_.zero.offload_param.buffer_size;
  for (const auto& group : groups)
    if (size && group.in_file() && group.shard() > *size)
      throw ConfigError(base::join("[Engine] zero_optimization.offload_param.buffer_size: got ", *size,
                                   " elements, expected at least ", group.shard(), ", the shard of group ", group.name,
                                   " (", who(), "). Hint: \"auto\" takes what is needed."));
}

void TierPlan::describe_files() const {
  const auto describe = [&](const ShardFile* file, const char* what) {
    if (file == nullptr || job_.comm->rank() != 0) return;
    base::log(LogLevel::Info, base::join(what, " rest in ", file->file().path(), ": ", file->bytes(),
                                         " bytes a rank, by ", file->file().description()));
    if (const auto notice = storage::folder_notice(file->folder()); !notice.empty())
      base::log(LogLevel::Warning, notice);
  };
  describe(states_file_.get(), "optimizer states");
  describe(params_file_.get(), "parameters");
}

void TierPlan::enforce(step::MemoryLedger& ledger) const {
  const auto budgets = step::Budgets::of(settings_.memory);
  for (const auto tier : step::kTiers)
    if (const auto& budget = budgets.of(tier))
      ledger.limit(tier, *budget, base::join("memory.", MemoryReport::name(tier)), who());
}

}  // namespace zero::engine
