// The other end of RemoteRanks: `zero run --agent`, started on a host by ssh, srun or mpirun. It carries
// out one plan, tells all it sees over stdout, and ends its ranks when stdin closes or falls silent.
#pragma once

namespace zero::launch {

// Speaks frames on `in` and `out` until the job is over. Returns the exit code of the process; errors are
// told to the launcher, none is thrown. Call it from the main thread.
int run_agent(int in, int out);

}  // namespace zero::launch
