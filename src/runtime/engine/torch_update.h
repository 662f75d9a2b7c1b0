// The optimizer's rule on the ranges that the step program names: cut by parameter group and by what is frozen. Delayed
// updates run in a thread of their own (ZeRO-Offload, arXiv:2101.06840, section 5.2).
#pragma once
#include <future>
#include <vector>

#include "base/executor.h"
#include "engine/model_binding.h"
#include "engine/update_runs.h"
#include "optim/sharded_optimizer.h"

namespace zero::engine {

class TorchUpdate final : public step::UpdateOps {
 public:
  // Everything outlives it. parameter_groups: of the optimizer, by group and member.
  TorchUpdate(optim::ShardedOptimizer& optimizer, ModelBinding& binding, TorchBuffers& buffers,
              const step::RunFacts& run, std::vector<std::vector<int>> parameter_groups, observe::Trace& trace);

  void begin_update() override;
  void end_update() override;
  void update(int group, std::int64_t begin, std::int64_t numel, const step::UpdateTarget& target, step::View grads,
              float factor) override;
  void run_beside(std::function<void()> job) override;
  void join() override;
  // No job is running; whatever became of it.
  void settle() noexcept;

  // What is trained has changed.
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
  std::vector<UpdateRuns> runs_;     // by group
  std::shared_future<void> beside_;  // of the last job; its error is told until the next begins
  base::Executor thread_;            // after what its job uses
};

}  // namespace zero::engine
