// Bytes of one rank by purpose and tier, current and peak; the data of Engine::memory(). Owners of memory book it here
// and cancel the booking when they free it.
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
  // From now on, a booking that would exceed `bytes` on the tier is refused: book() throws ConfigError (code
  // kOutOfMemory) with the bytes held and books nothing. The message names `key` and `who`.
  void limit(Tier tier, std::int64_t bytes, std::string key, std::string who);
  // Negative bytes cancel a booking. Thread-safe.
  void book(Tier tier, Purpose purpose, std::int64_t bytes);
  // Moves a booking between purposes without an intermediate higher sum.
  void rebook(Tier tier, Purpose from, Purpose to, std::int64_t bytes);
  MemoryReport report() const;
  void reset_peak();

 private:
  void raise_peak(std::size_t tier);
  std::int64_t total(std::size_t tier) const;
  [[noreturn]] void refuse(std::size_t tier, Purpose purpose, std::int64_t bytes) const;
  mutable std::mutex mutex_;
  // Signed, because a free may be seen before its allocation; reported as at least 0.
  std::int64_t now_[MemoryReport::kTiers][MemoryReport::kPurposes] = {};
  std::int64_t peak_[MemoryReport::kTiers][MemoryReport::kPurposes] = {};
  std::int64_t peak_total_[MemoryReport::kTiers] = {};
  struct Limit {
    std::int64_t bytes = std::numeric_limits<std::int64_t>::max();
    std::string key, who;
  } limits_[MemoryReport::kTiers];
};

}  // namespace zero::step
