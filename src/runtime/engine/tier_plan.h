// Where the states of an Engine rest, by the configuration's offload blocks and, for what they leave open, by its
// budgets: tiers, the files of this rank, and how many buffers serve them. Who moves what when is the groups'
// (ParamGroup), the Prefetcher's and the StagedUpdate's.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <zero/options.h>

#include "config/settings.h"
#include "engine/group_context.h"
#include "engine/param_group.h"
#include "engine/staged_update.h"
#include "step/facts.h"

namespace zero::engine {

class TierPlan {
 public:
  // Throws ConfigError for what a device cannot do.
  TierPlan(const Options& options, at::Device device, const comm::Group& comm);

  // Places the states of all units, in order of registration, by the configuration's offload blocks and budgets. Throws
  // ConfigError (code kOutOfMemory) when the budgets cannot be kept, naming the smallest that work.
  void arrange(const step::RunTopology& topology, std::int64_t accumulation, const std::vector<step::Unit>& units);
  void describe(GroupContext& context, std::size_t group) const;
  // Some optimizer states rest elsewhere than on the device.
  bool offloads() const;
  // After all groups have reserved their regions: takes the room. IoError when there is none, ConfigError for buffers
  // that are too small.
  void make_files(const std::vector<std::unique_ptr<ParamGroup>>& groups);
  // What the budgets promise is refused from now on.
  void enforce(step::MemoryLedger& ledger) const;

  StagedUpdate::Policy update_policy(int num_slots) const;
  // Groups, behind the one gathered ahead, whose shards are on their way from the file.
  int fetch_ahead() const;

 private:
  void check_device() const;

  const Options options_;
  const config::Settings& settings_;
  const at::Device device_;
  const int rank_, world_;
  std::vector<step::Placement> placements_;
  std::unique_ptr<engine::ShardFile> optimizer_file_, parameter_file_;  // null: nothing rests in a file
};

}  // namespace zero::engine
