// Where the states of an Engine rest, by the configuration's offload blocks and, for what they leave open, by its
// budgets: tiers, the files of this rank, and how many buffers serve them. Who moves what when is the groups'
// (ParamGroup), the Prefetcher's and the StagedUpdate's.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <zero/communicator.h>
#include <zero/options.h>

#include "config/settings.h"
#include "engine/group_context.h"
#include "engine/param_group.h"
#include "engine/staged_update.h"
#include "memory/placement.h"

namespace zero::engine {

class TierPlan {
 public:
  // Throws ConfigError for what a device cannot do.
  TierPlan(const Options& options, at::Device device, const Communicator& comm);

  // Decides for all groups, in order of registration; `rules` but for what this knows by itself (ratio, delay, tiles).
  // Throws ConfigError (code kOutOfMemory) when the budgets cannot be kept, naming the smallest that work.
  void arrange(memory::FootprintRules rules, const std::vector<memory::GroupSize>& groups,
               const std::vector<std::string>& names);
  void describe(GroupContext& context, std::size_t group) const;
  // Some optimizer states rest elsewhere than on the device.
  bool offloads() const;
  // After all groups have reserved their regions: takes the room. IoError when there is none, ConfigError for buffers
  // that are too small.
  void make_files(const std::vector<std::unique_ptr<ParamGroup>>& groups);
  // What the budgets promise is refused from now on.
  void enforce(memory::MemoryLedger& ledger) const;

  StagedUpdate::Policy update_policy(int num_slots) const;
  // Groups, behind the one gathered ahead, whose shards are on their way from the file.
  int fetch_ahead() const;

 private:
  memory::Budgets budgets() const;
  memory::Tier parameter_tier(std::int64_t shard);
  void check_device() const;
  [[noreturn]] void refuse(const memory::Placement& placement, const memory::Budgets& budgets) const;

  const Options options_;
  const config::Settings& settings_;
  const at::Device device_;
  const int rank_, world_;
  std::vector<memory::GroupPlace> places_;
  std::unique_ptr<offload::ShardFile> optimizer_file_, parameter_file_;  // null: nothing rests in a file
  std::int64_t in_host_ = 0;                                             // elements of parameters
};

}  // namespace zero::engine
