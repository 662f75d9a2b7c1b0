// Where the states of an Engine rest, by the configuration: tiers and files, and the update that serves them.
#include <algorithm>

#include "base/check.h"
#include "base/log.h"
#include "engine/state.h"

namespace zero::engine {
namespace {

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

void State::choose_places(GroupContext& context) {
  const auto& optimizer = settings_.zero.offload_optimizer;
  const auto& param = settings_.zero.offload_param;
  const auto who = base::join("rank ", comm_->rank(), "/", comm_->size());
  if (stage_ >= 1 && optimizer.device != config::OffloadDevice::None) {
    context.places.ratio = optimizer.ratio;
    context.places.pinned = !device_.is_cpu() && optimizer.pin_memory;
    context.places.optimizer = memory::Tier::Host;
    if (optimizer.device == config::OffloadDevice::Nvme && optimizer.ratio > 0) {
      optimizer_file_ = std::make_unique<offload::ShardFile>(optimizer.path, io_settings(settings_.aio), who);
      context.places.optimizer = memory::Tier::File;
      context.places.optimizer_file = optimizer_file_.get();
    }
    if (!device_.is_cpu() && optimizer.ratio < 1 && context.places.offloads())
      throw ConfigError(where("Engine") + base::join("zero_optimization.offload_optimizer.ratio: got ", optimizer.ratio,
                                                     " with parameters on a GPU, expected 1 or 0. Hint: a part of "
                                                     "the states can stay behind on CPUs only."));
  }
  if (stage_ == 3 && param.device == config::OffloadDevice::Nvme)
    parameter_file_ = std::make_unique<offload::ShardFile>(param.path, io_settings(settings_.aio), who);
  context.parameter_file = parameter_file_.get();
  context.delayed = settings_.zero.delayed_update && context.places.offloads();
}

// A shard rests in host memory as long as the elements allowed there last (max_in_cpu), then in the file.
memory::Tier State::parameter_tier_for(std::int64_t numel, std::int64_t* in_host) const {
  const auto& param = settings_.zero.offload_param;
  if (stage_ != 3 || param.device == config::OffloadDevice::None) return memory::Tier::Device;
  const auto shard = (numel + comm_->size() - 1) / comm_->size();
  if (param.device == config::OffloadDevice::Nvme && *in_host + shard > param.max_in_cpu) return memory::Tier::File;
  *in_host += shard;
  return memory::Tier::Host;
}

void State::make_files() {
  const auto make = [&](offload::ShardFile* file, const char* what) {
    if (file == nullptr) return;
    file->make();
    if (comm_->rank() == 0)
      base::log(LogLevel::Info, base::join(what, " rest in ", file->file().path(), ": ", file->bytes(),
                                           " bytes a rank, by ", file->file().description()));
  };
  make(optimizer_file_.get(), "optimizer states");
  make(parameter_file_.get(), "parameters");
}

// Faults of the buffers' numbers, before anything is trained.
void State::check_buffers() const {
  const auto& param = settings_.zero.offload_param;
  if (!parameter_file_ || !param.buffer_size) return;
  for (const auto& group : groups_)
    if (group->parameters().in_file() && group->parameters().numel() > *param.buffer_size)
      throw ConfigError(where("Engine") +
                        base::join("zero_optimization.offload_param.buffer_size: got ", *param.buffer_size,
                                   " elements, expected at least ", group->parameters().numel(),
                                   ", the shard of group ", group->name(), ". Hint: \"auto\" takes what is needed."));
}

void State::make_update() {
  const auto& optimizer = settings_.zero.offload_optimizer;
  const std::int64_t vectors = optimizer_->num_slots() + 2;  // of a tile, as DeepSpeed counts: with the gradient
  auto limit = settings_.zero.sub_group_size;
  if (optimizer.buffer_size) limit = std::min(limit, *optimizer.buffer_size);
  StagedUpdate::Policy policy;
  policy.tile_numel = StagedUpdate::tile_for(limit);
  policy.tiles = static_cast<int>(std::clamp<std::int64_t>(
      optimizer.buffer_count ? *optimizer.buffer_count / vectors : kPipeline, 1, 64));
  policy.read_ahead = optimizer.pipeline_read;
  policy.write_behind = optimizer.pipeline_write;
  std::vector<ParamGroup*> groups;
  for (const auto& group : groups_) groups.push_back(group.get());
  update_ = std::make_unique<StagedUpdate>(std::move(groups), policy, *ledger_, trace_.trace());
}

// Groups, behind the one gathered ahead, whose shards are on their way from the file.
int State::fetch_ahead() const {
  if (!parameter_file_) return 0;
  const auto& param = settings_.zero.offload_param;
  return static_cast<int>(std::clamp<std::int64_t>(param.buffer_count.value_or(kPipeline) - 1, 0, 64));
}

}  // namespace zero::engine
