// Where the states of an Engine rest, by the configuration: tiers, the files of this rank, and how many buffers serve
// them. Who moves what when is the groups' (ParamGroup), the Prefetcher's and the StagedUpdate's.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <zero/communicator.h>

#include "config/settings.h"
#include "engine/group_context.h"
#include "engine/param_group.h"
#include "engine/staged_update.h"

namespace zero::engine {

class TierPlan {
 public:
  // Throws ConfigError for what a device cannot do.
  TierPlan(const config::Settings& settings, at::Device device, const Communicator& comm);

  void describe(GroupContext& context) const;
  // For the next group, in order of registration: a shard rests in host memory as long as the elements allowed there
  // last (max_in_cpu), then in the file.
  memory::Tier next_parameter_tier(std::int64_t numel);
  // After all groups have reserved their regions: takes the room. IoError when there is none, ConfigError for buffers
  // that are too small.
  void make_files(const std::vector<std::unique_ptr<ParamGroup>>& groups);

  StagedUpdate::Policy update_policy(int num_slots) const;
  // Groups, behind the one gathered ahead, whose shards are on their way from the file.
  int fetch_ahead() const;

 private:
  const config::Settings& settings_;
  const int rank_, world_;
  StatePlaces places_;
  std::unique_ptr<offload::ShardFile> optimizer_file_, parameter_file_;  // null: nothing rests in a file
  std::int64_t in_host_ = 0;                                             // elements of parameters
};

}  // namespace zero::engine
