// Bytes of one rank by tier and purpose, now and at the peak. What Engine::memory() returns.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include <zero/export.h>

namespace zero {

class ZERO_API MemoryReport {
 public:
  enum class Tier { Device, Host, File };
  enum class Purpose {
    Parameters,
    Gradients,
    OptimizerStates,
    MasterParameters,
    GatherBuffers,
    ReduceBuffers,
    Activations,
    Other
  };
  static constexpr std::size_t kTiers = 3, kPurposes = 8;

  std::uint64_t current(Tier tier, Purpose purpose) const { return current_[index(tier)][index(purpose)]; }
  std::uint64_t peak(Tier tier, Purpose purpose) const { return peak_[index(tier)][index(purpose)]; }
  std::uint64_t current(Tier tier) const;
  // The highest sum over purposes at one moment, not the sum of their peaks.
  std::uint64_t peak(Tier tier) const { return peak_total_[index(tier)]; }

  // What libtorch's caching allocator counts on this process's GPU, in bytes, everything that uses it included; not set
  // on the CPU. On a GPU the purpose Activations stays empty: allocated less the purposes booked is the rest.
  struct Allocator {
    std::uint64_t allocated = 0, allocated_peak = 0;  // of live tensors
    std::uint64_t reserved = 0, reserved_peak = 0;    // taken from the driver
    std::int64_t retries = 0;                         // allocations that had to free the cache first
  };
  std::optional<Allocator> allocator;

  // An aligned table for people; tiers without bytes are left out.
  std::string table() const;

  static const char* name(Tier tier);
  static const char* name(Purpose purpose);

  template <class E>
  static constexpr std::size_t index(E value) {
    return static_cast<std::size_t>(value);
  }
  // For whoever makes a report: the bytes of a purpose, and the peak of a tier.
  void set(Tier tier, Purpose purpose, std::uint64_t current, std::uint64_t peak) {
    current_[index(tier)][index(purpose)] = current;
    peak_[index(tier)][index(purpose)] = peak;
  }
  void set_peak(Tier tier, std::uint64_t bytes) { peak_total_[index(tier)] = bytes; }

 private:
  std::array<std::array<std::uint64_t, kPurposes>, kTiers> current_{}, peak_{};
  std::array<std::uint64_t, kTiers> peak_total_{};
};

// Where bytes rest: memory that is computed with, host memory, files.
using Tier = MemoryReport::Tier;

}  // namespace zero
