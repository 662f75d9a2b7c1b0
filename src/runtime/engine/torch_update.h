// Applies the optimizer to the ranges that the step program passes, split by parameter group and without frozen
// parameters. Delayed updates run in a separate thread (ZeRO-Offload, arXiv:2101.06840, section 5.2).
#pragma once
#include <future>
#include <optional>
#include <vector>

#include "base/executor.h"
#include "engine/rule_update.h"
#include "optim/sharded_optimizer.h"

namespace zero::engine {

class TorchUpdate final : public step::UpdateOps {
 public:
  // All references must outlive it. parameter_groups: of the optimizer, by group and member. rule: of the groups that
  // are by_rule.
  TorchUpdate(optim::ShardedOptimizer& optimizer, std::shared_ptr<UpdateRule> rule, ModelBinding& binding,
              TorchBuffers& buffers, const step::RunFacts& run, std::vector<std::vector<int>> parameter_groups,
              observe::Trace& trace);

  void begin_update(std::optional<float> factor) override;
  void end_update(bool applied) override;
  void update(int group, std::int64_t begin, std::int64_t numel, const step::UpdateTarget& target,
              step::View grads) override;
  void complete_updates() override;
  void run_async(std::function<void()> job) override;
  void join() override;
  // Waits until no job is running and ignores its errors.
  void settle() noexcept;

  // Call after the set of trained parameters changed.
  void cut_runs(int group);
  const std::vector<std::int64_t>& missed_steps(int group) const { return runs(group).missed_steps(); }
  void set_missed_steps(int group, std::vector<std::int64_t> missed);

 private:
  const UpdateRuns& runs(int group) const { return runs_[static_cast<std::size_t>(group)]; }

  optim::ShardedOptimizer& optimizer_;
  ModelBinding& binding_;
  TorchBuffers& buffers_;
  const step::RunFacts& run_;
  observe::Trace& trace_;
  std::vector<UpdateRuns> runs_;            // by group
  const std::unique_ptr<RuleUpdate> rule_;  // null: no group is by_rule
  std::optional<float> factor_;
  std::vector<at::Tensor> zeros_;       // in place of missing gradients, until complete_updates()
  std::shared_future<void> async_job_;  // the last job; its error is rethrown until the next begins
  base::Executor thread_;               // last: its job uses the members above
};

}  // namespace zero::engine
