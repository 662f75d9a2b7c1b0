#include "memory/ledger.h"

#include <algorithm>

namespace zero::memory {

void MemoryLedger::raise_peak(std::size_t tier) {
  std::int64_t total = 0;
  for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p) {
    total += std::max<std::int64_t>(0, now_[tier][p]);
    peak_[tier][p] = std::max(peak_[tier][p], now_[tier][p]);
  }
  peak_total_[tier] = std::max(peak_total_[tier], total);
}

void MemoryLedger::book(Tier tier, Purpose purpose, std::int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto t = MemoryReport::index(tier);
  now_[t][MemoryReport::index(purpose)] += bytes;
  if (bytes > 0) raise_peak(t);
}

void MemoryLedger::rebook(Tier tier, Purpose from, Purpose to, std::int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto t = MemoryReport::index(tier);
  now_[t][MemoryReport::index(from)] -= bytes;
  now_[t][MemoryReport::index(to)] += bytes;
  raise_peak(t);
}

MemoryReport MemoryLedger::report() const {
  std::lock_guard<std::mutex> lock(mutex_);
  MemoryReport result;
  for (std::size_t t = 0; t < MemoryReport::kTiers; ++t) {
    for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p) {
      result.current_[t][p] = static_cast<std::uint64_t>(std::max<std::int64_t>(0, now_[t][p]));
      result.peak_[t][p] = static_cast<std::uint64_t>(std::max<std::int64_t>(0, peak_[t][p]));
    }
    result.peak_total_[t] = static_cast<std::uint64_t>(peak_total_[t]);
  }
  return result;
}

void MemoryLedger::reset_peak() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t t = 0; t < MemoryReport::kTiers; ++t) {
    peak_total_[t] = 0;
    for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p) peak_[t][p] = now_[t][p];
    raise_peak(t);
  }
}

}  // namespace zero::memory
