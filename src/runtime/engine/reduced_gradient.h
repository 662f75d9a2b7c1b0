// This rank's part of the reduced gradient of one parameter, between backward and the update.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "engine/parts.h"

namespace zero::engine {

// The offset in the parameter of this rank's shard, in elements, and its values: flat, in the dtype they are stored in.
std::pair<std::int64_t, at::Tensor> reduced_gradient(const Parts& parts, int group, std::size_t member);

}  // namespace zero::engine
