// When groups are gathered and released at stage 3. On use: a group is gathered when an operator
// touches it, and others are let go. Ahead: the order of the last training pass tells which group
// comes next, and its gather is begun early. A different order costs nothing but the wait, and is
// learned anew. Decisions depend only on the order of uses, so all ranks take the same ones.
//
// Groups that are read in place cost nothing and stay until the end of the phase. Of the others at most two are
// gathered at once (the one in use and the next), beside the root, which stays from its first use to the end of the
// phase. Forward and backward are two phases with an order each; everything is released between them (ZeRO's volume:
// two gathers and a reduction). A reuse distance keeps more: groups that the expected order uses again soon, up to a
// limit of elements.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace zero::engine {

class ParamGroup;

class Prefetcher {
 public:
  // In elements.
  struct Policy {
    std::int64_t ahead;      // the largest group gathered ahead; 0: none
    std::int64_t max_live;   // gathered at once; nothing is gathered ahead or kept beyond it
    std::int64_t max_reuse;  // used in between, for a group to be kept; 0: none is
    int fetch_ahead = 0;     // groups, behind the one gathered ahead, whose shards are fetched from files
  };
  Prefetcher(std::vector<ParamGroup*> groups, const Policy& policy, std::function<void(const std::string&)> diverged);

  // Groups[0..count) (indices) are about to be read together. `training`: part of a pass that
  // ends in a backward, so its order is worth learning.
  void use(const int* groups, int count, bool training);
  // Forward is over: everything is released that is not used again within the reuse distance.
  void begin_backward();
  // Backward is over: everything is released, and the orders just seen are those to expect.
  void end_pass();
  // The shards that forward needs first come from their files: after an update.
  void fetch_first();
  // Gathers copies of everything and keeps them until unpin_all().
  void pin_all();
  void unpin_all();
  bool pinned() const { return pinned_; }

  // Passes in which the order differed from the one expected.
  std::int64_t divergences() const { return divergences_; }

 private:
  void note_use(int group, bool training);
  int expected_next() const;
  void release_all();
  void fetch_from(std::size_t position);
  void release_others(const int* groups, int count, int next);
  bool releasable(int group) const;
  std::int64_t numel_of(int group) const;
  std::int64_t live_numel() const;
  bool used_soon(int group) const;

  std::vector<ParamGroup*> groups_;
  const Policy policy_;
  std::function<void(const std::string&)> on_divergence_;
  enum Phase { kForward, kBackward };
  Phase phase_ = kForward;
  std::vector<int> order_[2], seen_[2];
  std::size_t position_ = 0;  // in the phase's order, of the group used last
  bool at_start_ = true, diverged_ = false, pinned_ = false;
  int last_ = -1;
  std::int64_t divergences_ = 0;
};

}  // namespace zero::engine
