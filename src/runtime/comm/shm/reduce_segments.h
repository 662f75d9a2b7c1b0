// Sums and copies of vectors in several segments, over the memory of all ranks of a host. Arithmetic on addresses;
// shm.cpp ensures that the peers' memory may be read.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "comm/tensor_segments.h"

namespace zero::comm::shm {

// Addresses of the segments: places[rank][i] is the first byte of segment i. This rank's are those of sum.vector.
using Places = std::vector<std::vector<const std::byte*>>;

// Writes this rank's part of the sum and calls sum.summed.
void sum_own_part(const PeerReduce& sum, const Places& places, int rank);
// Copies the parts that other ranks have summed into this rank's segments.
void copy_other_parts(const PeerReduce& sum, const Places& places, int rank);

}  // namespace zero::comm::shm
