// See topology.h.
#include "plan/topology.h"

namespace zero::planning {

step::RunTopology topology_of(int world, const std::string& transport, bool gpu, bool deferred_init) {
  const bool cpus = !gpu && world > 1;
  step::Axis axis{.name = "dp", .size = world, .rank = 0};
  // Only processes of one host read each other's memory; ranks that are threads copy, as GPUs do.
  axis.peer_reads = cpus && transport == "shm";
  axis.quantizes = cpus && (transport == "gloo" || transport == "shm+gloo");
  return {.axes = {axis}, .world = world, .gpu = gpu, .deferred_init = deferred_init};
}

}  // namespace zero::planning
