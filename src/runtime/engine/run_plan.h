// What build() (build.h) decides about a Job.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include <zero/mesh.h>

#include "engine/tier_plan.h"
#include "engine/units.h"

namespace zero::engine {

// The groups of ranks over which a run is divided.
struct RankGroups {
  // Those over which a group's states are sharded.
  comm::Group& of(const step::GroupFacts& group) const { return *axes[static_cast<std::size_t>(group.axis)]; }

  std::shared_ptr<Mesh> mesh;
  std::shared_ptr<comm::Group> shard, tensor;      // along "dp_sp", over which states are sharded, and "tp"
  std::vector<std::shared_ptr<comm::Group>> axes;  // by axis of RunPlan::run: `shard`, and those of equal experts
};

struct RunPlan {
  config::BatchSizes batch;
  at::Device device;  // of the parameters and of all states that are not offloaded
  step::RunFacts run;
  std::unique_ptr<const TierPlan> tiers;
  std::vector<ModelParameter> remote;  // of experts of other ranks, in order of registration
};

}  // namespace zero::engine
