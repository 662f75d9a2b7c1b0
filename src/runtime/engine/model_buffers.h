// Buffers of the model: which kinds an Engine takes, rank 0's values for every rank, and which of them files hold.
#pragma once
#include <c10/core/ScalarType.h>

#include <set>
#include <string>

#include "engine/parts.h"

namespace torch::nn {
class Module;
}

namespace zero::engine {

// Buffers that are no part of the state dict (zero/unsaved_buffers.h), by their full names.
std::set<std::string> unsaved_buffers(const torch::nn::Module& model);

// Before anything is sent: ConfigError that lists the buffers that cannot be broadcast, and names of buffers that
// files cannot hold. ranks: of the run.
void check_buffers(const torch::nn::Module& model, int ranks);

// Moves the buffers onto the Engine's device if `moves`, gives them libzero's buffer dtype, and broadcasts rank 0's
// values. Collective.
void adopt_buffers(const Parts& parts, bool moves);

// Whether files can hold the buffer.
bool can_be_saved(const at::Tensor& buffer);
// ConfigError for a sparse or nested one.
void require_dense(const at::Tensor& buffer, const std::string& name);

}  // namespace zero::engine
