// Ranks as processes that share a communicator over shared memory, for its tests.
#pragma once
#include <ATen/Parallel.h>

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <zero/communicator.h>

#include "comm/group.h"
#include "comm/transport.h"
#include "support/collective_checks.h"
#include "support/fork_ranks.h"
#include "support/require.h"

namespace zero::test {

using Comm = std::shared_ptr<Communicator>;

inline net::ProcessInfo identity_of(const std::string& run_id, int rank, int size) {
  net::ProcessInfo identity;
  identity.rank = identity.local_rank = rank;
  identity.size = identity.local_size = size;
  identity.run_id = run_id;
  return identity;
}

inline Comm join_run(const std::string& run_id, int rank, int size,
                     std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  at::set_num_threads(1);
  return comm::make_communicator(comm::make_shm(identity_of(run_id, rank, size), timeout));
}

// Runs `body` on `size` processes that share a communicator.
inline std::vector<RankEnd> with_ranks(int size, const std::function<void(Comm)>& body) {
  const std::string run_id = fresh_run_id();
  return fork_ranks(size, [&](int rank) { body(join_run(run_id, rank, size)); });
}

}  // namespace zero::test
