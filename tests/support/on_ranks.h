// Ranks as threads, each with one compute thread, and a timeout that ends a test that hangs.
#pragma once
#include <ATen/Parallel.h>
#include <zero/communicator.h>

#include <chrono>
#include <functional>
#include <memory>

namespace zero::test {

inline void on_ranks(int world, const std::function<void(const std::shared_ptr<Communicator>&)>& body) {
  ThreadFaults faults;
  faults.timeout = std::chrono::seconds(60);
  run_ranks(world, faults, [&](std::shared_ptr<Communicator> comm) {
    at::set_num_threads(1);
    body(comm);
  });
}

}  // namespace zero::test
