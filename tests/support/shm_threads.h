// Ranks as threads of this process over the shared-memory transport, with one mapping of each rank's memory, for
// ThreadSanitizer, which does not follow forks and identifies memory by address. Deaths are tested with processes
// (shm_ranks.h). SymmetricBuffer::whole() has separate addresses here, too.
#pragma once
#include <ATen/Parallel.h>

#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/shm/arena.h"
#include "support/shm_ranks.h"

namespace zero::test {

// Runs `body` on `size` threads, each with its rank's communicator; returns when all have ended. On the first
// exception, the other ranks are aborted and the exception is rethrown here.
inline void with_shm_threads(int size, const std::function<void(Comm)>& body,
                             std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  const std::string run_id = fresh_run_id();
  comm::shm::Mappings mappings;
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      at::set_num_threads(1);
      Comm comm;
      try {
        comm = comm::make_communicator(comm::make_shm(identity_of(run_id, rank, size), timeout, nullptr, &mappings));
        body(comm);
      } catch (const std::exception& error) {
        {
          std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
        if (comm) comm->abort(error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace zero::test
