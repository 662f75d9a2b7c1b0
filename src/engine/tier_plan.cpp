// See tier_plan.h.
#include "engine/tier_plan.h"

#include <algorithm>

#include "base/check.h"
#include "base/log.h"

namespace zero::engine {
namespace {

using config::OffloadDevice;

// Buffers of a pipeline: a tile or shard in use, one arriving, one leaving.
constexpr std::int64_t kPipeline = 3;

offload::IoSettings io_settings(const config::AioSettings& aio) {
  return {.block_size = aio.block_size,
          .queue_depth = aio.queue_depth,
          .threads = aio.threads,
          .single_submit = aio.single_submit,
          .overlap_events = aio.overlap_events};
}

}  // namespace

TierPlan::TierPlan(const config::Settings& settings, at::Device device, const Communicator& comm)
    : settings_(settings), rank_(comm.rank()), world_(comm.size()) {
  const auto& optimizer = settings_.zero.offload_optimizer;
  const auto& param = settings_.zero.offload_param;
  const auto file_in = [&](const std::string& folder) {
    return std::make_unique<offload::ShardFile>(folder, io_settings(settings_.aio),
                                                base::join("rank ", rank_, "/", world_));
  };
  if (settings_.zero.stage >= 1 && optimizer.device != OffloadDevice::None) {
    places_.ratio = optimizer.ratio;
    places_.pinned = !device.is_cpu() && optimizer.pin_memory;
    places_.optimizer = memory::Tier::Host;
    if (optimizer.device == OffloadDevice::Nvme && optimizer.ratio > 0) {
      optimizer_file_ = file_in(optimizer.path);
      places_.optimizer = memory::Tier::File;
      places_.optimizer_file = optimizer_file_.get();
    }
    if (!device.is_cpu() && optimizer.ratio < 1 && places_.offloads())
      throw ConfigError(base::join("[Engine] zero_optimization.offload_optimizer.ratio: got ", optimizer.ratio,
                                   " with parameters on a GPU, expected 1 or 0 (rank ", rank_, "/", world_,
                                   "). Hint: a part of the states can stay behind on CPUs only."));
  }
  if (settings_.zero.stage != 3 || param.device != OffloadDevice::Nvme) return;
  // A GPU's kernels cannot write to where a file reads from.
  if (!device.is_cpu() && !places_.offloads())
    throw ConfigError(
        base::join("[Engine] zero_optimization.offload_param.device: got \"nvme\" with the optimizer "
                   "on a GPU, expected offload_optimizer.device cpu or nvme beside it (rank ",
                   rank_, "/", world_, ")."));
  parameter_file_ = file_in(param.path);
}

void TierPlan::describe(GroupContext& context) const {
  context.places = places_;
  context.parameter_file = parameter_file_.get();
  context.delayed = settings_.zero.delayed_update && places_.offloads();
}

memory::Tier TierPlan::next_parameter_tier(std::int64_t numel) {
  const auto& param = settings_.zero.offload_param;
  if (settings_.zero.stage != 3 || param.device == OffloadDevice::None) return memory::Tier::Device;
  const auto shard = (numel + world_ - 1) / world_;
  if (param.device == OffloadDevice::Nvme && in_host_ + shard > param.max_in_cpu) return memory::Tier::File;
  in_host_ += shard;
  return memory::Tier::Host;
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
    if (rank_ == 0)
      base::log(LogLevel::Info, base::join(what, " rest in ", file->file().path(), ": ", file->bytes(),
                                           " bytes a rank, by ", file->file().description()));
  };
  make(optimizer_file_.get(), "optimizer states");
  make(parameter_file_.get(), "parameters");
}

StagedUpdate::Policy TierPlan::update_policy(int num_slots) const {
  const auto& optimizer = settings_.zero.offload_optimizer;
  const std::int64_t vectors = num_slots + 2;  // of a tile, as DeepSpeed counts: with the gradient
  auto limit = settings_.zero.sub_group_size;
  if (optimizer.buffer_size) limit = std::min(limit, *optimizer.buffer_size);
  const auto tiles = optimizer.buffer_count ? *optimizer.buffer_count / vectors : kPipeline;
  return {.tile_numel = StagedUpdate::tile_for(limit),
          .tiles = static_cast<int>(std::clamp<std::int64_t>(tiles, 1, 64)),
          .read_ahead = optimizer.pipeline_read,
          .write_behind = optimizer.pipeline_write};
}

int TierPlan::fetch_ahead() const {
  if (!parameter_file_) return 0;
  return static_cast<int>(
      std::clamp<std::int64_t>(settings_.zero.offload_param.buffer_count.value_or(kPipeline) - 1, 0, 64));
}

}  // namespace zero::engine
