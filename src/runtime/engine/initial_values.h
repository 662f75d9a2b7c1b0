// The first values of parameters, which become shards: those of a model that has them, or of a deferred build.
#pragma once

#include "engine/parts.h"

namespace zero::engine {

// Rank 0's values, and the parameters point into the Engine's buffers. At any time there is one whole parameter in
// addition to the shards and what is left of the model; where there is no tensor parallelism, and a model that has
// values is sharded over several ranks, one unit. Collective.
void adopt_parameters(const Parts& parts);

}  // namespace zero::engine
