// The reduced gradient of one parameter, as far as this rank has it, between backward and the update.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "engine/parts.h"

namespace zero::engine {

// What of it is in this rank's shard: from which element of the parameter on, and flat, in the dtype in which it is
// kept.
std::pair<std::int64_t, at::Tensor> reduced_gradient(const Parts& parts, int group, std::size_t member);

}  // namespace zero::engine
