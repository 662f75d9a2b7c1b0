// The ranks of a plan as the facts of a step see them: what Communicator::transport() of a run would say, in words.
#pragma once
#include <string>

#include "step/facts.h"

namespace zero::planning {

// transport: "local", "thread", "shm", "gloo", "shm+gloo" or "nccl". deferred_init: built by zero::build.
step::RunTopology topology_of(int world, const std::string& transport, bool gpu, bool deferred_init = true);

}  // namespace zero::planning
