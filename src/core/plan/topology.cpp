// See topology.h.
#include "plan/topology.h"

#include <utility>
#include <vector>

namespace zero::planning {

step::RunTopology topology_of(int world, const std::string& transport, bool gpu, bool deferred_init, int ep_size) {
  const bool cpus = !gpu && world > 1;
  step::Axis axis{.name = "dp", .size = world, .rank = 0};
  // Only processes of one host read each other's memory; ranks that are threads copy, as GPUs do.
  axis.peer_reads = cpus && transport == "shm";
  axis.quantizes = cpus && (transport == "gloo" || transport == "shm+gloo");
  std::vector<step::Axis> axes{axis};
  if (ep_size > 1) {
    axis.name = "edp";
    axis.size = world / ep_size;
    if (axis.size == 1) axis.peer_reads = axis.quantizes = false;
    axes.push_back(axis);
  }
  return {.axes = std::move(axes), .world = world, .gpu = gpu, .deferred_init = deferred_init};
}

}  // namespace zero::planning
