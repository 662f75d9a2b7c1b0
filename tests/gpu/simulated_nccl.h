// NCCL for ranks that are forked processes, each with a simulated GPU of its own: sockets carry the data as operations
// are enqueued, and the simulated GPU notes what they access on which stream. An operation that a peer does not take
// part in never ends on its stream, as NCCL's.
#pragma once
#include <chrono>

namespace zero::test::simulated_nccl {

// Before the ranks are forked: their connections.
void connect(int ranks);

// In a rank, before it uses its GPU: from now on it is rank `rank` of connect(), its GPU has that number, and the
// transport "nccl" uses this NCCL.
void be_rank(int rank);

// How long an operation waits for a peer's data before it counts as one that never ends.
void be_patient(std::chrono::milliseconds limit);

// The next operation is refused with this ncclResult_t.
void refuse_next(int result);

}  // namespace zero::test::simulated_nccl
