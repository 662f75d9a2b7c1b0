// Construction of an Engine from a model: agreement between ranks, placement of states, its parts, initial values.
#pragma once
#include <memory>
#include <vector>

#include "engine/parts.h"

namespace zero::engine {

// What build() has decided and made before any memory is taken.
struct Draft {
  RunPlan plan;
  RankGroups ranks;
  std::vector<TorchComm::Ranks> axes;  // RankGroups::axes, with the ranks that hold secondary shards together
  std::unique_ptr<optim::ShardedOptimizer> optimizer;
  std::unique_ptr<optim::LossScaler> scaler;
  std::vector<int> expert_degrees;
  std::vector<std::vector<ModelParameter>> members;  // by group
};

// Does not change the model. Collective: throws on every rank or on none. Both must outlive the result.
Parts build(const Job& job, ErrorRelay& relay);
// Copies the model's values into the Engine's buffers and points the parameters there. Collective.
void adopt_model(const Parts& parts);
// Releases the model: unsharded parameters stay usable, sharded ones throw an explanation when read.
void abandon_model(const Parts& parts) noexcept;

}  // namespace zero::engine
