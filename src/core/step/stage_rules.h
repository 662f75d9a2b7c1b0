// What a stage decides, as arithmetic: who keeps the whole of a state, and when it is sent. For the engine, which acts
// on it; the step program has its own types for it (step/facts.h). No dtypes, no tensors, no tiers.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace zero::step {

// Parameters: from stage 3 on this rank keeps its part alone, where there are other ranks or it rests elsewhere.
constexpr bool shards_parameters(int stage, bool persistent, int world, bool offloaded) {
  return stage == 3 && !persistent && (world > 1 || offloaded);
}
constexpr bool shards_optimizer(int stage) { return stage >= 1; }
constexpr bool shards_gradients(int stage) { return stage >= 2; }

// Gradients kept whole are sent once, at the boundary; others after every micro-batch.
constexpr bool reduces_now(int stage, bool boundary) { return shards_gradients(stage) || boundary; }

// New values of parameters that every rank keeps whole, and updates a part of.
constexpr bool publishes_parameters(int stage, bool sharded, int world) {
  return shards_optimizer(stage) && !sharded && world > 1;
}

// Reductions under way beside the next: one while backward runs, or, where they take no memory, all.
constexpr std::size_t reductions_beside(int stage, bool in_place, bool overlap, std::size_t under_way) {
  return in_place && !shards_gradients(stage) ? under_way : overlap ? 1 : 0;
}

}  // namespace zero::step
