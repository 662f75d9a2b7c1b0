// Detects replicas that diverged between ranks: a flipped bit of memory, a faulty device.
#pragma once
#include "engine/parts.h"

namespace zero::engine {

// Compares hashes of the stored parameters that ranks replicate (stages 0 to 2, persistent units of stage 3), and of
// counters, learning rates, the loss scale and the last norm. One exchange of 16 bytes a rank if all are equal.
// [collective] InternalError with ExitCode::kNumerical that names parameters and ranks, the same on all ranks.
void compare_replicas(Parts& parts);
// The same in every libzero.replica_check_steps-th step; call before the update of each.
void compare_replicas_at_times(Parts& parts);
// Compares the masters, optimizer states and frozen parameters that tensor-parallel ranks have in common; a checkpoint
// has them once. One exchange of a number if all are equal. Call between steps. `call` is named in errors.
// [collective] InternalError with ExitCode::kNumerical that names tensors and ranks, the same on all ranks.
void compare_tensor_parallel_ranks(const Parts& parts, const char* call);

}  // namespace zero::engine
