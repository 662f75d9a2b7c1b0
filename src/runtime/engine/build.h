// Construction of an Engine from a model: agreement between ranks, placement of states, its parts.
#pragma once
#include <memory>
#include <vector>

#include "engine/parts.h"

namespace zero::engine {

// What a rank finds in the model and the configuration, before any data is moved.
struct Found {
  std::vector<ModelParameter> parameters;
  std::vector<int> expert_degrees;
  std::vector<sharding::Unit> units;  // of the parameters that this rank has
  config::BatchSizes batch{};
  std::unique_ptr<optim::ShardedOptimizer> optimizer;
  std::shared_ptr<UpdateRule>
      rule;  // the program's, or Muon's of matrices; null: all rules are of elements and built in
  std::unique_ptr<optim::LossScaler> scaler;
  at::Device device = at::kCPU;
};

// Does not change the model. Collective: throws on every rank or on none. Both must outlive the result.
Parts build(const Job& job, ErrorRelay& relay);

}  // namespace zero::engine
