// Delays for ranks that are threads of one process.
#pragma once
#include <zero/communicator.h>

#include <chrono>
#include <cstdint>
#include <random>
#include <string_view>
#include <thread>

namespace zero::test {

// Every rank sleeps a little, differently each time, before its collectives.
inline ThreadFaults random_delays(unsigned seed) {
  ThreadFaults faults;
  faults.before = [seed](int rank, std::uint64_t sequence, std::string_view) {
    std::minstd_rand random(seed + 7919u * static_cast<unsigned>(rank) + static_cast<unsigned>(sequence));
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  };
  return faults;
}

}  // namespace zero::test
