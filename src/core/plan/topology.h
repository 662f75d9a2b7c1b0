// The topology of a planned run, from the transport's name as Communicator::transport() returns it.
#pragma once
#include <string>

#include "step/facts.h"

namespace zero::planning {

// ep_size: above 1: a second axis, "edp", over which experts are sharded. transport: "local", "thread", "shm", "gloo",
// "shm+gloo" or "nccl". deferred_init: the model is built by zero::build.
step::RunTopology topology_of(int world, const std::string& transport, bool gpu, bool deferred_init = true,
                              int ep_size = 1);

}  // namespace zero::planning
