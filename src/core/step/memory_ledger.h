// Bytes of one rank by purpose and tier, now and at the peak; behind Engine::memory(). Whoever
// holds memory books it here and cancels the booking when it lets go.
#pragma once
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>

#include <zero/memory_report.h>

namespace zero::step {

using Tier = MemoryReport::Tier;
using Purpose = MemoryReport::Purpose;

class MemoryLedger {
 public:
  // From now on a booking that would take the tier above `bytes` is refused: book() throws ConfigError (code
  // kOutOfMemory) with what is held, and books nothing. `key` and `who` are named in the message.
  void limit(Tier tier, std::int64_t bytes, std::string key, std::string who);
  // bytes may be negative: a booking cancelled. Thread-safe.
  void book(Tier tier, Purpose purpose, std::int64_t bytes);
  // Moves a booking without passing through a higher sum.
  void rebook(Tier tier, Purpose from, Purpose to, std::int64_t bytes);
  MemoryReport report() const;
  void reset_peak();

 private:
  void raise_peak(std::size_t tier);
  std::int64_t total(std::size_t tier) const;
  [[noreturn]] void refuse(std::size_t tier, Purpose purpose, std::int64_t bytes) const;
  mutable std::mutex mutex_;
  // Signed, since frees may be seen before the matching allocation; reported as at least 0.
  std::int64_t now_[MemoryReport::kTiers][MemoryReport::kPurposes] = {};
  std::int64_t peak_[MemoryReport::kTiers][MemoryReport::kPurposes] = {};
  std::int64_t peak_total_[MemoryReport::kTiers] = {};
  struct Limit {
    std::int64_t bytes = std::numeric_limits<std::int64_t>::max();
    std::string key, who;
  } limits_[MemoryReport::kTiers];
};

}  // namespace zero::step
