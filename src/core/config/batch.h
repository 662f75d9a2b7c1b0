// Checks of a configuration that need to know the run: the batch equation and what this version can do.
#pragma once
#include <zero/options.h>

#include "config/settings.h"

namespace zero::config {

// train = micro * accumulation * world, the missing ones inferred. Throws ConfigError that shows
// the equation with its numbers and the place of every key involved.
BatchSizes resolve_batch(const Options& options, int world);

// Throws ConfigError naming every key that asks for what this version cannot do.
void require_built(const Options& options);

}  // namespace zero::config
