// The copy of an all-gather: every rank's part to its place beside the others. When the parts may be read is known in
// shm.cpp.
//
// [Note: large results] What all ranks read and write in one collective may be more than the caches hold. Then results
// are streamed to memory: they would be gone from the caches before anybody reads them, and what they overwrite need
// not be read first. And all ranks go through all parts together, piece by piece, so that a piece comes from memory
// once, for the first of them.
#pragma once
#include <cstddef>
#include <vector>

#include "kernels/elementwise.h"

namespace zero::comm::shm {

// How the results of a collective are written whose whole, over all ranks, has `bytes`, among `ranks` of this host.
kernels::Stores stores_for(std::size_t bytes, int ranks);

// The part of each rank in parts[rank], `bytes` long, goes to out + rank * bytes; nothing happens to one that is there
// already or null. Begins with the part of `first`.
void gather_parts(std::byte* out, const std::vector<const std::byte*>& parts, std::size_t bytes, int first,
                  kernels::Stores stores);

}  // namespace zero::comm::shm
