// Applies an UpdateRule to the ranges that the step program passes: makes a piece of each parameter in them, with an
// fp32 gradient, and casts the new masters. A parameter that the rule needs whole is gathered on its owner and sent
// back. The built-in rules of elements are in torch_update.h.
#pragma once
#include <memory>
#include <vector>

#include <zero/update_rule.h>

#include "engine/model_binding.h"
#include "engine/update_runs.h"
#include "optim/sharded_optimizer.h"

namespace zero::engine {

class RuleUpdate {
 public:
  // All references must outlive it. ConfigError for whole parameters that the run cuts into tiles or ranks' parts.
  RuleUpdate(std::shared_ptr<UpdateRule> rule, const optim::ShardedOptimizer& optimizer, const ModelBinding& binding,
             TorchBuffers& buffers, const step::RunFacts& run);

  void begin(float factor);
  void end();
  // As step::UpdateOps::update(), of a group that is by_rule. [collective] over the axis of one with owners.
  void update(const ModelBinding::Group& group, const UpdateRuns& runs, std::int64_t begin, std::int64_t numel,
              const step::UpdateTarget& target, step::View grads);

 private:
  struct Range;
  class Scratch;
  class Exchange;
  void check(const step::GroupFacts& facts, const ModelParameter& member) const;
  UpdatePiece piece_of(const Range& range, std::size_t member) const;
  void update_whole(const Range& range, Scratch& scratch);

  const std::shared_ptr<UpdateRule> rule_;
  const optim::ShardedOptimizer& optimizer_;
  TorchBuffers& buffers_;
  const step::RunFacts& run_;
  float factor_ = 1;
};

// What the program's rule says of itself, and in ModelParameter::states of each parameter. ConfigError for states that
// cannot be: too many, twice, or without a name.
optim::ProgramRule describe(const UpdateRule& rule, std::vector<ModelParameter>& parameters);

}  // namespace zero::engine
