// Decides when sharded groups are unsharded and resharded. A group is unsharded when an operator first reads it; groups
// that are not needed soon are resharded to free their memory. The order of the last training pass predicts the next
// group, whose all-gather starts early. A pass in another order costs a wait, and its order is learned. Decisions
// depend only on the order of uses, so they are the same on all ranks. Groups of one module, whose parameters differ in
// kind, are used together: operators read them in turn.
//
// Symmetric groups (peers read the stored shards in place) cost no memory and stay until the end of the phase. Of the
// others, those of at most two modules are unsharded at once, the one in use and the next, plus the root, which stays
// from its first use to the end of the phase. Forward and backward are two phases, each with its own order; everything
// is resharded between them (ZeRO's volume: two all-gathers and a reduction). A reuse distance keeps more: groups that
// the expected order soon uses again, up to a limit of elements. Independent of tensors; the planner uses it as the
// engine does.
//
// [Note: several threads] Uses may come from several threads. One lock protects each decision. It is not held while an
// operator runs, so it cannot deadlock autograd's threads. A group that an operator reads, from begin_use() to
// end_use(), is not resharded; that is left to a later use. Code that replaces parameters needs exclusive access
// (Alone): it is refused while such an operator runs, and operators are refused while it is held.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace zero::step {

// A group that is unsharded and resharded as a whole.
class Unshardable {
 public:
  enum class Residency { Sharded, Unsharding, Unsharded };

  virtual ~Unshardable() = default;
  virtual const std::string& name() const = 0;
  virtual bool root() const = 0;
  // The same number for groups of one module; negative: it is the only one.
  virtual int module() const { return -1; }
  virtual std::int64_t padded_numel() const = 0;
  virtual std::int64_t whole_bytes() const = 0;  // of the unsharded vector
  virtual bool rests_sharded() const = 0;
  virtual bool rests_in_file() const = 0;
  // Peers read the stored shards in place: unsharding costs no memory, so resharding frees none.
  virtual bool symmetric() const = 0;
  virtual Residency residency() const = 0;

  // Starts reading the shard if it is in a file, so that begin_unshard() need not wait. Local.
  virtual void begin_fetch() = 0;
  // Drops a fetched shard that was not used. Called before the file is written.
  virtual void cancel_fetch() = 0;
  virtual void begin_unshard() = 0;
  virtual void finish_unshard() = 0;  // from Sharded or Unsharding
  virtual void unshard_copy() = 0;    // the same, into memory of this rank that may be written
  virtual void reshard() = 0;         // frees the unsharded copy, after completing a pending all-gather
};

class Prefetcher {
 public:
  // In elements.
  struct Policy {
    std::int64_t ahead;      // size limit of a module unsharded ahead; 0: none is
    std::int64_t max_live;   // limit of elements unsharded at once, for unsharding ahead and reuse
    std::int64_t max_reuse;  // a module is kept if at most this many elements are used in between; 0: never
    int fetch_ahead = 0;     // number of groups, beyond the module unsharded ahead, whose shards are fetched from files
  };
  Prefetcher(std::vector<Unshardable*> groups, const Policy& policy, std::function<void(const std::string&)> diverged);

  // Groups[0..count) (indices) are about to be read by one operator. training: part of a pass that ends in a backward,
  // so its order is learned.
  void use(const int* groups, int count, bool training);
  // The same, and they stay unsharded until end_use(). Throws ConfigError while an Alone exists.
  void begin_use(const int* groups, int count, bool training);
  void end_use(const int* groups, int count) noexcept;
  // RAII guard for replacing parameters. Throws ConfigError, prefixed with `where`, if an operator of another thread
  // reads one.
  class Alone {
   public:
    Alone(Prefetcher& prefetcher, const std::string& where);
    ~Alone();
    Alone(const Alone&) = delete;
    Alone& operator=(const Alone&) = delete;

   private:
    Prefetcher& prefetcher_;
  };
  // Forward has ended: reshards everything that is not used again within the reuse distance.
  void begin_backward();
  // Backward has ended: reshards everything; the orders of this pass are expected next.
  void end_pass();
  // After an update: starts fetching the file shards that forward needs first.
  void fetch_first();
  // Unshards copies of these groups, each listed once, and keeps them until a matching unpin() of the group.
  void pin(const std::vector<int>& groups);
  void unpin(const std::vector<int>& groups);
  // The same for all groups.
  void pin_all();
  void unpin_all();
  // Bytes of the groups that are sharded in storage and unsharded now.
  std::int64_t unsharded_bytes() const;

  // Number of passes whose order differed from the expected one.
  std::int64_t divergences() const { return divergences_; }

 private:
  using Lock = std::lock_guard<std::recursive_mutex>;
  bool read_now(int group) const {
    return readers_[static_cast<std::size_t>(group)].load(std::memory_order_acquire) != 0;
  }
  bool pinned(int group) const { return pins_[static_cast<std::size_t>(group)] != 0; }
  bool all_pinned() const { return pinned_groups_ == groups_.size(); }
  bool reshard(int group);
  // Modules are numbers of module_of_.
  int module_of(int group) const { return module_of_[static_cast<std::size_t>(group)]; }
  const std::vector<int>& members(int module) const { return members_[static_cast<std::size_t>(module)]; }
  bool is_root(int module) const;
  bool needs_memory(int group) const;
  void note_use(int module, bool training);
  int expected_next() const;
  void reshard_all(), forget_resharded();
  void hold(int group);
  void fetch_from(std::size_t position);
  void reshard_others(const std::vector<int>& modules, int next);
  bool may_be_resharded(int group) const;
  std::int64_t numel_of(int group) const;
  std::int64_t numel_of_module(int module) const;
  std::int64_t sharded_numel(int module) const;
  std::int64_t live_numel() const;
  bool used_soon(int module) const;

  std::vector<Unshardable*> groups_;
  std::vector<int> module_of_;             // by group
  std::vector<std::vector<int>> members_;  // by module
  const Policy policy_;
  mutable std::recursive_mutex mutex_;     // guards the members below except readers_, and the groups' residency
  std::vector<std::atomic<int>> readers_;  // by group: operators that read it now; incremented under the lock
  int alone_ = 0;
  std::function<void(const std::string&)> on_divergence_;
  enum Phase { kForward, kBackward };
  Phase phase_ = kForward;
  std::vector<int> order_[2], seen_[2];  // modules
  std::vector<int> in_use_;              // modules of the use that is handled
  std::vector<int> held_;                // unsharded copies, complete or pending, in order; few of many
  std::size_t position_ = 0;             // of the module used last, in the phase's order
  bool at_start_ = true, diverged_ = false;
  std::vector<int> pins_;  // by group: pins that keep it
  std::size_t pinned_groups_ = 0;
  int last_ = -1;  // module
  std::int64_t divergences_ = 0;
};

}  // namespace zero::step
