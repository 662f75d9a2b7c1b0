#include "step/memory_ledger.h"

#include <algorithm>

#include <zero/errors.h>

#include "base/check.h"

namespace zero::step {

std::int64_t MemoryLedger::total(std::size_t tier) const {
  std::int64_t sum = 0;
  for (const auto bytes : now_[tier]) sum += std::max<std::int64_t>(0, bytes);
  return sum;
}

void MemoryLedger::raise_peak(std::size_t tier) {
  for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p) peak_[tier][p] = std::max(peak_[tier][p], now_[tier][p]);
  peak_total_[tier] = std::max(peak_total_[tier], total(tier));
}

void MemoryLedger::limit(Tier tier, std::int64_t bytes, std::string key, std::string who) {
  std::lock_guard<std::mutex> lock(mutex_);
  limits_[MemoryReport::index(tier)] = {bytes, std::move(key), std::move(who)};
}

void MemoryLedger::refuse(std::size_t tier, Purpose purpose, std::int64_t bytes) const {
  const auto& limit = limits_[tier];
  std::string held;
  for (std::size_t p = 0; p < MemoryReport::kPurposes; ++p)
    if (now_[tier][p] > 0)
      held += base::join(held.empty() ? "" : ", ", MemoryReport::name(static_cast<Purpose>(p)), " ", now_[tier][p]);
  throw ConfigError(
      base::join("[Engine] ", limit.key, ": got a need for ", bytes, " more bytes (", MemoryReport::name(purpose),
                 ") in addition to the ", total(tier), " held (", held, "), expected at most ", limit.bytes,
                 " in all (", limit.who, "). Hint: ",
                 purpose == Purpose::Activations
                     ? "leave more room with memory.activations, take a smaller micro-batch, or checkpoint activations."
                     : "a larger budget; the model uses more of its parameters at once than was planned for."),
      ExitCode::kOutOfMemory);
}

void MemoryLedger::book(Tier tier, Purpose purpose, std::int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto t = MemoryReport::index(tier);
  if (bytes > 0 && total(t) + bytes > limits_[t].bytes) refuse(t, purpose, bytes);
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
      const auto bytes = [](std::int64_t value) {
        return static_cast<std::uint64_t>(std::max<std::int64_t>(0, value));
      };
      result.set(static_cast<Tier>(t), static_cast<Purpose>(p), bytes(now_[t][p]), bytes(peak_[t][p]));
    }
    result.set_peak(static_cast<Tier>(t), static_cast<std::uint64_t>(peak_total_[t]));
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

}  // namespace zero::step
