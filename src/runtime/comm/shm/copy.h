// The copies of an all-gather: every rank's part into its position. shm.cpp ensures that the parts may be read.
//
// [Note: large results] If a collective reads and writes more than the caches hold, results are streamed to memory:
// they would be evicted before use, and streaming avoids reading the overwritten memory first. All ranks then process
// all parts in the same order, piece by piece, so that a piece is read from memory only once, by the first rank.
#pragma once
#include <cstddef>
#include <vector>

#include "kernels/elementwise.h"

namespace zero::comm::shm {

// How to write the results of a collective that has `bytes` in total over `ranks` ranks of this host.
kernels::Stores stores_for(std::size_t bytes, int ranks);

// Copies parts[rank], `bytes` long, to out + rank * bytes, beginning with the part of rank `first`. Skips parts that
// are null or already there.
void gather_parts(std::byte* out, const std::vector<const std::byte*>& parts, std::size_t bytes, int first,
                  kernels::Stores stores);

}  // namespace zero::comm::shm
