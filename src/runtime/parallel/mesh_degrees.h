// The degrees of parallelism of all ranks are compared before any group of ranks is made: ranks with other degrees
// would make other groups, and wait for each other.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include <zero/mesh.h>

namespace zero::parallel {

// What a rank tells the others: autotp_size and sequence_parallel_size. Nothing if both are 1, so that a run without
// them sends no byte more.
std::string degrees_of(const Options& options);
// by_rank: of all ranks. ConfigError that names who has what, unless all are equal.
void require_equal_degrees(const std::string& where, const std::vector<std::string>& by_rank);

// A rank's coordinates where ep_size of `ranks` ranks share the experts of a layer (Mesh::Experts).
struct ExpertGrid {
  int place = 0, copy = 0, copies = 1;  // ranks / ep_size copies of every expert
  static ExpertGrid of(int rank, int ranks, int ep_size, bool data_before_experts);
};

struct MeshMaker {
  // Mesh::of() for ranks whose degrees have been compared. [collective]
  static std::shared_ptr<Mesh> make(const Options& options, std::shared_ptr<Communicator> world);
};

}  // namespace zero::parallel
