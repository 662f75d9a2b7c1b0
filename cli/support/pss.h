// Memory of this process as the kernel counts it: proportional set size, in which a page that n processes
// share counts 1/n for each. Unlike resident size it adds up over ranks that share memory.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>

namespace zero::cli {

// Bytes now (Pss of /proc/self/smaps_rollup). Throws IoError.
std::uint64_t pss_bytes();

// A thread that reads it every two milliseconds from start to stop. A peak shorter than that, or
// than a reading (which walks all pages), may be missed; measure no times while it runs.
class PssSampler {
 public:
  PssSampler();
  ~PssSampler();
  PssSampler(const PssSampler&) = delete;
  PssSampler& operator=(const PssSampler&) = delete;
  // Ends the thread; the highest value read, one last reading included.
  std::uint64_t stop();

 private:
  std::atomic<bool> ends_{false};
  std::atomic<std::uint64_t> highest_{0};
  std::thread thread_;
};

}  // namespace zero::cli
