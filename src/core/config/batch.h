// Checks of a configuration that depend on the run: the batch equation and unsupported settings.
#pragma once
#include <zero/options.h>

#include "base/world_rule.h"
#include "config/settings.h"

namespace zero::config {

// The degrees of parallelism of a run. Rank (d * sequence + i) * tensor + j has data coordinate d.
struct MeshShape {
  int data = 1, sequence = 1, tensor = 1;
};
// Throws ConfigError if tensor * sequence does not divide `world`.
MeshShape mesh_shape(const Options& options, int world);
// Throws ConfigError if world / tensor ranks are no multiple of the configuration's
// libzero.model.experts.ep_size.
void require_expert_ranks(const Options& options, int world);
// What the batch equation counts: "ranks", or "data-parallel ranks" if samples have several.
const char* ranks_name(const Settings& settings);

// train = micro * accumulation * data-parallel ranks; computes missing values. Throws ConfigError with the equation,
// its numbers and the location of every key involved.
BatchSizes resolve_batch(const Options& options, int world);

// The numbers of ranks for which resolve_batch(), mesh_shape() and require_expert_ranks() do not throw.
base::WorldRule world_rule(const Options& options);

// Throws ConfigError that names every key whose setting this version does not support.
void require_built(const Options& options);

}  // namespace zero::config
