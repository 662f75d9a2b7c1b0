// Rendezvous of the processes of one host: a unix socket in the abstract namespace, opened by rank 0 during the
// rendezvous, over which ranks pass the descriptors of their memory and of themselves. No files, no ports; only
// processes of the same user that prove the run's secret (net/secret.h) are admitted.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "comm/shm/arena.h"
#include "comm/transport.h"

namespace zero::comm::shm {

struct Member {
  pid_t pid = 0;
  base::Descriptor memory;   // its arena
  base::Descriptor process;  // its pidfd; empty if the kernel does not support pidfds
};

// Blocks until all ranks of `identity.run_id` have connected. Returns one Member per rank, including this one.
// CommError: ranks that did not connect within `timeout`, a rank that two processes claim, a rank that died meanwhile,
// a rank of a different world size, too few file descriptors. abort_check, if given, is called about every 100 ms and
// may throw.
std::vector<Member> rendezvous(const net::ProcessInfo& identity, int memory, std::chrono::milliseconds timeout,
                               const std::function<void()>& abort_check = nullptr);

}  // namespace zero::comm::shm
