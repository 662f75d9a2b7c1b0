// Sums and copies of a vector that lies in stretches, over the memory of all ranks of a host: arithmetic on addresses.
// When the peers' memory may be read is known in shm.cpp.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/tensor_segments.h"

namespace zero::comm::shm {

// Where the stretches of each rank begin: places[rank][i] is the first byte of stretch i. The own rank's are
// sum.vector's.
using Places = std::vector<std::vector<const std::byte*>>;

// Writes this rank's part of the sum, and tells sum.summed.
void sum_own_part(const PeerReduce& sum, const Places& places, int rank);
// Copies the parts that the other ranks have summed into this rank's stretches.
void copy_other_parts(const PeerReduce& sum, const Places& places, int rank);

}  // namespace zero::comm::shm
