// State shared by all parts of a step.
#pragma once
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "step/memory.h"
#include "step/observer.h"

namespace zero::step {

struct Context {
  const RunFacts& facts;
  Backend backend;
  Memory& memory;
  Observer& observer;

  // Host memory that the device can copy to and from.
  Place host() const { return facts.topology.gpu ? Place::PinnedHost : Place::Host; }
  Place place_of(Tier tier) const {
    return tier == Tier::File ? Place::File : tier == Tier::Host ? host() : Place::Device;
  }
};

// `values` are elements of a group's flat vector from `begin` on: zeroes those that belong to no parameter.
inline void zero_gaps(const Context& c, const sharding::ShardLayout& layout, std::int64_t begin, const View& values) {
  for (const auto& gap : layout.gaps()) {
    const auto from = std::max(gap.begin, begin), to = std::min(gap.begin + gap.numel, begin + values.numel);
    if (from < to) c.backend.tensors.fill(values.part(from - begin, to - from), 0);
  }
}

// A pending operation of one or several Works. The observer sees it until it has been waited for.
class Pending {
 public:
  Pending() = default;
  Pending(Pending&&) = default;
  Pending& operator=(Pending&&) = default;

  void begin(std::unique_ptr<Observed> observed) { observed_ = std::move(observed); }
  void add(WorkPtr work) { works_.push_back(std::move(work)); }
  explicit operator bool() const { return !works_.empty(); }
  bool done() const {
    return std::all_of(works_.begin(), works_.end(), [](const WorkPtr& work) { return work->done(); });
  }
  // No effect if nothing is pending. May be called again after an error, for the remaining Works.
  void wait() {
    if (works_.empty()) return;
    if (observed_) observed_->waiting();
    while (!works_.empty()) {
      const auto work = std::move(works_.back());
      works_.pop_back();
      work->wait();
    }
    observed_.reset();
  }
  // Waits until nothing is pending and ignores errors, before the memory is freed.
  void settle() noexcept {
    while (!works_.empty()) try {
        wait();
      } catch (const std::exception&) {
        // The error was already reported, or the result is not needed.
      }
  }

 private:
  std::unique_ptr<Observed> observed_;
  std::vector<WorkPtr> works_;
};

}  // namespace zero::step
