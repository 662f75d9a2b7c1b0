// Bytes of one rank by purpose and tier, now and at the peak; behind Engine::memory(). Whoever
// holds memory books it here and cancels the booking when it lets go.
#pragma once
#include <cstdint>
#include <mutex>

#include <zero/memory_report.h>

namespace zero::memory {

using Tier = MemoryReport::Tier;
using Purpose = MemoryReport::Purpose;

class MemoryLedger {
 public:
  // bytes may be negative: a booking cancelled. Thread-safe.
  void book(Tier tier, Purpose purpose, std::int64_t bytes);
  // Moves a booking without passing through a higher sum.
  void rebook(Tier tier, Purpose from, Purpose to, std::int64_t bytes);
  MemoryReport report() const;
  void reset_peak();

 private:
  void raise_peak(std::size_t tier);
  mutable std::mutex mutex_;
  // Signed, since frees may be seen before the matching allocation; reported as at least 0.
  std::int64_t now_[MemoryReport::kTiers][MemoryReport::kPurposes] = {};
  std::int64_t peak_[MemoryReport::kTiers][MemoryReport::kPurposes] = {};
  std::int64_t peak_total_[MemoryReport::kTiers] = {};
};

}  // namespace zero::memory
