// Muon (Keller Jordan, 2024, https://kellerjordan.github.io/posts/muon/): what optimizer.type "Muon" does to matrices.
// The numbers are torch.optim.Muon's. ShardedOptimizer updates the other parameters.
#pragma once
#include <set>
#include <string>
#include <vector>

#include <zero/update_rule.h>

#include "optim/sharded_optimizer.h"

namespace zero::engine {

class MuonRule final : public UpdateRule {
 public:
  // matrices: names of the parameters that it updates. `optimizer` must outlive it.
  MuonRule(std::set<std::string> matrices, const optim::ShardedOptimizer& optimizer);

  std::string name() const override { return optimizer_.name(); }
  std::vector<std::string> states(const std::string& parameter, const std::vector<std::int64_t>& shape) const override;
  double lr() const override { return optimizer_.lr(); }
  Scope scope(const std::string& parameter, const std::vector<std::int64_t>& shape) const override;
  double cost(const std::string& parameter, const std::vector<std::int64_t>& shape) const override;
  void update(std::span<UpdatePiece> pieces) override;

 private:
  const std::set<std::string> matrices_;
  const optim::ShardedOptimizer& optimizer_;
};

}  // namespace zero::engine
