// Gathers a state of all ranks, between steps.
#pragma once
#include "engine/parts.h"
#include "engine/state_access.h"

namespace zero::engine {

// The whole state of a group, flat, fp32, with the padding. kMaster of a frozen group: its parameters. Collective.
at::Tensor gathered_state(const Parts& parts, const step::Group& group, int state);

}  // namespace zero::engine
