// Where the states of an Engine rest: by the configuration's offload blocks and, for what they leave open, by its
// budgets. And the files of this rank. When anything moves is the step program's.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <zero/options.h>

#include "comm/group.h"
#include "engine/file_regions.h"
#include "step/memory_ledger.h"
#include "step/placement.h"

namespace zero::engine {

// How files are read and written.
storage::IoSettings io_settings(const config::AioSettings& aio);

class TierPlan {
 public:
  // Places all units, in order of registration. Throws ConfigError for what a device cannot do, and (code
  // kOutOfMemory) when the budgets cannot be kept, naming the smallest that work. `run` outlives it.
  TierPlan(const Options& options, const step::RunFacts& run, std::vector<step::Unit> units, const comm::Group& comm);

  std::vector<step::GroupFacts> facts() const { return step::group_facts(run_, settings_, units_, placements_); }
  // Of a unit that was frozen, if it were not.
  step::GroupFacts trained_facts(std::size_t unit) const;
  // Some optimizer states rest elsewhere than on the device.
  bool offloads() const;
  // null: nothing rests in them. What is in them is this rank's.
  const std::shared_ptr<ShardFile>& states_file() const { return states_file_; }
  const std::shared_ptr<ShardFile>& params_file() const { return params_file_; }
  // ConfigError for buffers that are smaller than a shard.
  void check_buffers(const std::vector<step::GroupFacts>& groups) const;
  // The files that were made are told of, once a run.
  void describe_files() const;
  // What the budgets promise is refused from now on.
  void enforce(step::MemoryLedger& ledger) const;

 private:
  void check_device() const;
  void place();
  std::shared_ptr<ShardFile> file_in(const std::string& configured) const;
  std::string who() const;

  const Options options_;
  const config::Settings& settings_;
  const step::RunFacts& run_;
  const std::vector<step::Unit> units_;
  const int rank_;
  std::vector<step::Placement> placements_;
  std::shared_ptr<ShardFile> states_file_, params_file_;
};

}  // namespace zero::engine
