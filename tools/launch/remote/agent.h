// The remote side of RemoteRanks: `zero run --agent`, started on a host by ssh, srun or mpirun. It executes one plan,
// reports over stdout, and ends its ranks when stdin closes or is silent for too long.
#pragma once

namespace zero::launch {

// Exchanges frames on `in` and `out` until the job has ended. Returns the exit code of the process. Errors are reported
// to the launcher and not thrown. Call from the main thread.
int run_agent(int in, int out);

}  // namespace zero::launch
