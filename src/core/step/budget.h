// What the states of a rank need while it trains, so that a budget can be judged before anything is allocated: the
// program itself is run on the dry backend. What rests is exact. What comes and goes is the most that a model takes
// which uses its units one after the other in the order of registration; a model that uses them in another order can
// need more, since complete gradients wait for their turn to be reduced.
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
  // The purposes' peaks, which need not be at one moment: enough whenever they are.
  std::int64_t total(Tier tier) const;
};

Need need_of(const RunFacts& run, const std::vector<GroupFacts>& groups);

}  // namespace zero::step
