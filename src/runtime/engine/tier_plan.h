// The tier of an Engine's states: by the configuration's offload blocks and, where they do not decide, by its budgets.
// Also owns this rank's files. The step program decides when states are moved.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "engine/file_regions.h"
#include "engine/job.h"
#include "step/memory_ledger.h"
#include "step/placement.h"

namespace zero::engine {

// Settings for file I/O.
storage::IoSettings io_settings(const config::AioSettings& aio);

class TierPlan {
 public:
  // Places all units, in order of registration. Throws ConfigError for options that the device does not support and
  // (code kOutOfMemory) for infeasible budgets, with the smallest feasible ones. `job` must
  // outlive it.
  TierPlan(const Job& job, const step::RunFacts& run, std::vector<step::Unit> units);

  std::vector<step::GroupFacts> facts() const { return step::group_facts(run_, settings_, units_, placements_); }
  // The facts of a frozen unit if it were trained.
  step::GroupFacts trained_facts(std::size_t unit) const;
  // Whether some optimizer states are not on the device.
  bool offloads() const;
  // null: not used. The files hold this rank's states only.
  const std::shared_ptr<ShardFile>& states_file() const { return states_file_; }
  const std::shared_ptr<ShardFile>& params_file() const { return params_file_; }
  // ConfigError if an I/O buffer is smaller than a shard.
  void check_buffers(const std::vector<step::GroupFacts>& groups) const;
  // Logs the files that were created, once per run.
  void describe_files() const;
  // From now on, the ledger refuses allocations beyond the budgets.
  void enforce(step::MemoryLedger& ledger) const;

 private:
  void check_device() const;
  void place();
  std::shared_ptr<ShardFile> file_in(const std::string& configured) const;
  std::string who() const;

  const Job& job_;
  const config::Settings& settings_;  // of job_
  const step::RunFacts run_;
  const std::vector<step::Unit> units_;
  std::vector<step::Placement> placements_;
  std::shared_ptr<ShardFile> states_file_, params_file_;
};

}  // namespace zero::engine
