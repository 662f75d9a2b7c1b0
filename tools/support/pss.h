// The proportional set size of this process: a page that n processes share counts 1/n in each. Unlike the resident
// size, it adds up over ranks that share memory.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>

namespace zero::cli {

// Current bytes (Pss of /proc/self/smaps_rollup). Throws IoError.
std::uint64_t pss_bytes();

// A thread that reads it every two milliseconds from start to stop. Shorter peaks may be missed, also because a reading
// walks all pages. Do not measure times while it runs.
class PssSampler {
 public:
  PssSampler();
  ~PssSampler();
  PssSampler(const PssSampler&) = delete;
  PssSampler& operator=(const PssSampler&) = delete;
  // Ends the thread and returns the maximum, including one last reading.
  std::uint64_t stop();

 private:
  std::atomic<bool> ends_{false};
  std::atomic<std::uint64_t> highest_{0};
  std::thread thread_;
};

}  // namespace zero::cli
