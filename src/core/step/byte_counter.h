// Counts the bytes that a rank moves and the elements that it updates. The observer of plans.
#pragma once
#include "step/observer.h"

namespace zero::step {

// Of one rank: bytes sent to other ranks, over a GPU's host link, and to and from files; elements updated.
struct Traffic {
  std::int64_t gathered = 0, reduced = 0;  // bytes sent for parameters; for gradients
  std::int64_t collectives = 0;            // an all-reduce counts as two
  std::int64_t to_host = 0, from_host = 0, read = 0, written = 0;
  std::int64_t updated = 0, updated_offloaded = 0;  // elements: all; those with offloaded states
  void add(const Traffic& other, std::int64_t times = 1);
};

class ByteCounter final : public Observer {
 public:
  explicit ByteCounter(const RunFacts& run);
  std::unique_ptr<Observed> issued(const Op& op) override;
  // Returns the counts since the last call.
  Traffic take();

 private:
  void count(const Op& op);

  const bool gpu_;
  Traffic traffic_;
};

}  // namespace zero::step
