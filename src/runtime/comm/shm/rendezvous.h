// How the processes of one host find each other: a unix socket in the abstract name space, kept by
// rank 0 while they gather, over which each passes the descriptors of its memory and of itself.
// Nothing is left on a disk, no port is opened, and only processes of the same user are let in.
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
  base::Descriptor process;  // its pidfd; empty where the kernel has none
};

// Blocks until all ranks of `identity.run_id` have come. Returns one Member per rank (this rank's
// own included). CommError: names the ranks that did not come in `timeout`, a rank that two processes claim,
// a rank that died meanwhile, a rank of a world of another size.
// `look`, if there is one, is called every 100 ms or so and may throw.
std::vector<Member> rendezvous(const net::ProcessInfo& identity, int memory, std::chrono::milliseconds timeout,
                               const std::function<void()>& abort_check = nullptr);

}  // namespace zero::comm::shm
