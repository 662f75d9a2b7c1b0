// One rank of a run without the others.
#pragma once
#include <memory>

#include <zero/communicator.h>

namespace zero {

// [local] Rank `rank` of `size`, all on one host, whose peers do not exist: for the memory, the launches and the time
// of one rank at any world size, on one CPU or one GPU. The same purpose as torch's "fake" process group. An all-gather
// fills every part with this rank's own, a reduction and a broadcast leave this rank's values, and messages of all
// ranks are this rank's. So all operations of a step run and CommStats counts what would be sent, but the results of
// training mean nothing. ConfigError for a rank outside [0, size).
ZERO_API std::shared_ptr<Communicator> fake_communicator(int rank, int size);

}  // namespace zero
