// The memory that a rank's states need during training, so that budgets can be checked before anything is allocated.
// The step program is run on the dry backend. Persistent bytes are exact. Transient bytes are the maximum for a model
// that uses its units in order of registration. A model with another order can need more, because complete gradients
// wait until it is their turn to be reduced.
#pragma once
#include <cstdint>
#include <vector>

#include "step/facts.h"

namespace zero::step {

// Bytes by tier and purpose, without activations.
struct Need {
  std::int64_t bytes[MemoryReport::kTiers][MemoryReport::kPurposes] = {};
  std::int64_t of(Tier tier, Purpose purpose) const {
    return bytes[MemoryReport::index(tier)][MemoryReport::index(purpose)];
  }
  // The sum of the purposes' peaks, which need not occur at the same time: an upper bound.
  std::int64_t total(Tier tier) const;
};

Need need_of(const RunFacts& run, const std::vector<GroupFacts>& groups);

}  // namespace zero::step
