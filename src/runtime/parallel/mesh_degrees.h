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

struct MeshMaker {
  // Mesh::of() for ranks whose degrees have been compared. [collective]
  static std::shared_ptr<Mesh> make(const Options& options, std::shared_ptr<Communicator> world);
};

}  // namespace zero::parallel
