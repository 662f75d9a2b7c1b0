// Decides when sharded groups are unsharded and resharded. A group is unsharded when an operator first reads it; groups
// that are not needed soon are resharded to free their memory. The order of the last training pass tells which group
// comes next, and its all-gather is begun early. A pass in another order costs the wait, and is learned anew. Decisions
// depend only on the order of uses, so all ranks take the same ones.
//
// Symmetric groups (peers read the resting shards in place) cost no memory and stay until the end of the phase. Of the
// others at most two are unsharded at once (the one in use and the next), beside the root, which stays from its first
// use to the end of the phase. Forward and backward are two phases with an order each; everything is resharded between
// them (ZeRO's volume: two all-gathers and a reduction). A reuse distance keeps more: groups that the expected order
// uses again soon, up to a limit of elements. Nothing here knows tensors, so a planner uses it as an engine does.
//
// [Note: several threads] Uses may come from several threads. One lock is around each decision; it is not held while an
// operator runs, so autograd's threads cannot wait for each other by it. A group that an operator reads, from
// begin_use() to end_use(), is not resharded: whoever would have leaves it to the next. What replaces the parameters
// themselves asks to be Alone, and is refused beside such an operator, as are uses beside it.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace zero::step {

// What is unsharded and resharded as a whole.
class Unshardable {
 public:
  enum class Residency { Sharded, Unsharding, Unsharded };

  virtual ~Unshardable() = default;
  virtual const std::string& name() const = 0;
  virtual bool root() const = 0;
  virtual std::int64_t padded_numel() const = 0;
  virtual bool rests_sharded() const = 0;
  virtual bool rests_in_file() const = 0;
  // Peers read the resting shards in place: unsharding costs no memory, and nothing need be resharded for others.
  virtual bool symmetric() const = 0;
  virtual Residency residency() const = 0;

  // Reads the shard from its file, if it rests in one, so that begin_unshard() need not wait. Not a collective.
  virtual void begin_fetch() = 0;
  // Drops what was fetched and not used: before the file is written.
  virtual void cancel_fetch() = 0;
  virtual void begin_unshard() = 0;
  virtual void finish_unshard() = 0;  // from Sharded or Unsharding
  virtual void unshard_copy() = 0;    // the same, into memory of this rank that the program may write
  virtual void reshard() = 0;         // drops the unsharded copy; finishes an all-gather under way first
};

class Prefetcher {
 public:
  // In elements.
  struct Policy {
    std::int64_t ahead;      // the largest group unsharded ahead; 0: none
    std::int64_t max_live;   // unsharded at once; nothing is unsharded ahead or kept beyond it
    std::int64_t max_reuse;  // used in between, for a group to be kept; 0: none is
    int fetch_ahead = 0;     // groups, behind the one unsharded ahead, whose shards are fetched from files
  };
  Prefetcher(std::vector<Unshardable*> groups, const Policy& policy, std::function<void(const std::string&)> diverged);

  // Groups[0..count) (indices) are about to be read together. `training`: part of a pass that
  // ends in a backward, so its order is worth learning.
  void use(const int* groups, int count, bool training);
  // The same, and they stay until end_use() whatever other threads use. Throws ConfigError while someone is Alone.
  void begin_use(const int* groups, int count, bool training);
  void end_use(const int* groups, int count) noexcept;
  // While it lives the parameters may be replaced. Throws ConfigError, beginning with `where`, when an operator of
  // another thread reads one.
  class Alone {
   public:
    Alone(Prefetcher& prefetcher, const std::string& where);
    ~Alone();
    Alone(const Alone&) = delete;
    Alone& operator=(const Alone&) = delete;

   private:
    Prefetcher& prefetcher_;
  };
  // Forward is over: everything is resharded that is not used again within the reuse distance.
  void begin_backward();
  // Backward is over: everything is resharded, and the orders just seen are those to expect.
  void end_pass();
  // The shards that forward needs first come from their files: after an update.
  void fetch_first();
  // Gathers copies of these groups, each named once, and keeps them until unpin() has been called for a group as often.
  void pin(const std::vector<int>& groups);
  void unpin(const std::vector<int>& groups);
  // The same for all groups.
  void pin_all();
  void unpin_all();
  // Of the groups that rest sharded and do not now.
  std::int64_t unsharded_numel() const;

  // Passes in which the order differed from the one expected.
  std::int64_t divergences() const { return divergences_; }

 private:
  using Lock = std::lock_guard<std::recursive_mutex>;
  bool read_now(int group) const {
    return readers_[static_cast<std::size_t>(group)].load(std::memory_order_acquire) != 0;
  }
  bool pinned(int group) const { return pins_[static_cast<std::size_t>(group)] != 0; }
  bool all_pinned() const { return pinned_groups_ == groups_.size(); }
  bool reshard(int group);
  void note_use(int group, bool training);
  int expected_next() const;
  void reshard_all(), forget_resharded();
  void hold(int group);
  void fetch_from(std::size_t position);
  void reshard_others(const int* groups, int count, int next);
  bool may_be_resharded(int group) const;
  std::int64_t numel_of(int group) const;
  std::int64_t live_numel() const;
  bool used_soon(int group) const;

  std::vector<Unshardable*> groups_;
  const Policy policy_;
  mutable std::recursive_mutex mutex_;     // around all that is below but readers_, and the groups' residency
  std::vector<std::atomic<int>> readers_;  // by group: operators that read it now; raised under the lock
  int alone_ = 0;
  std::function<void(const std::string&)> on_divergence_;
  enum Phase { kForward, kBackward };
  Phase phase_ = kForward;
  std::vector<int> order_[2], seen_[2];
  std::vector<int> held_;     // unsharded copies, here or on their way, in order: few of many
  std::size_t position_ = 0;  // in the phase's order, of the group used last
  bool at_start_ = true, diverged_ = false;
  std::vector<int> pins_;  // by group: how many pin() keep it
  std::size_t pinned_groups_ = 0;
  int last_ = -1;
  std::int64_t divergences_ = 0;
};

}  // namespace zero::step
