// The gradients of one group, from their arrival to the update: where they are kept and how they are reduced over the
// ranks of the axis. Three strategies, by GradStorageKind. When a group is reduced is the program's decision.
#pragma once
#include <memory>
#include <vector>

#include "step/context.h"

namespace zero::step {

// What is left of the gradients that have been accumulated, when a micro-batch is dropped in its middle.
enum class KeptGrads {
  All,   // it has added nothing yet
  Copy,  // save_copy()
  None,
};

class GradStorage {
 public:
  // `context` and `facts` outlive the result, which makes its resting buffers.
  static std::unique_ptr<GradStorage> make(const Context& context, const GroupFacts& facts, int group);
  virtual ~GradStorage();

  // Whether a member is trained; one that is not is not awaited and counts as zeros. Between steps; all are at first.
  void set_active(int member, bool active) { active_[static_cast<std::size_t>(member)] = active; }
  // first: nothing has been accumulated since the last step. boundary: what this pass adds is reduced for the update.
  void begin_micro_step(bool first, bool boundary);
  // False: the member had its gradient, and the group has been reduced since.
  bool accepts(int member) const;
  bool taken(int member) const { return taken_[static_cast<std::size_t>(member)] != 0; }
  // A gradient has arrived. peer_readable: peers can read it where it is, and nothing else shares its memory. True: it
  // was the last one awaited.
  bool take(int member, View arrived, bool peer_readable);
  // Active members without a gradient, which count as zeros from now on.
  std::vector<int> fill_missing();
  bool all_taken() const { return awaited_ == 0; }

  void begin_reduce();
  void finish_reduce();
  bool reduced() const { return work_.done(); }
  // The last micro-batch was the boundary after all: reduces what was kept whole.
  void close_accumulation();

  // A copy of what has been accumulated, until drop_copy() or discard(KeptGrads::Copy).
  virtual void save_copy();
  virtual void drop_copy();
  // Ends a pass in its middle, also one that failed.
  void discard(KeptGrads kept);

  // Before a delayed update: what was reduced becomes what the update reads, and its buffer is free for the next step.
  void hand_over();
  // What the update reads: the owned range, or the whole vector. None: the members' own .grad.
  View source() const { return pending_ ? pending_ : sum(); }
  // The same of the last reduction.
  View sum() const { return copied_ ? copied_ : kept_; }
  // Member's own .grad, where sum() is none; none if it has no gradient.
  virtual View kept(int /*member*/) const { return {}; }
  // After the step.
  virtual void clear();

 protected:
  GradStorage(const Context& context, const GroupFacts& facts, int group);
  virtual void keep(int member, View arrived, bool peer_readable, bool again) = 0;
  virtual void fill(int member) = 0;
  virtual bool start_reduce() = 0;  // false: nothing to reduce now
  virtual void end_reduce() {}
  virtual void drop() {}  // what is held during a pass or a reduction
  virtual void restore_copy();
  virtual void copy_to_host() = 0;
  virtual void square() = 0;

  View rest(Tier tier, Role role, std::int64_t numel) const;
  // Begins the operation that finish_reduce() waits for.
  void observe_reduce(bool to_all);
  const Axis& axis() const { return c_.facts.axis_of(facts_); }
  const MixedPrecisionPolicy& precision() const { return c_.facts.precision; }
  std::int64_t shard_begin() const { return c_.facts.shard_begin(facts_); }
  std::int64_t numel_of(int member) const { return facts_.layout.parameter_numel(static_cast<std::size_t>(member)); }
  // The first sum of a step can be made where it is kept.
  bool sums_straight() const { return first_ && precision().grad == precision().reduce; }
  View own_part(const View& flat) const;
  // Of this rank's shard, what belongs to no member.
  void zero_gaps_of_shard(const View& shard) const;
  // Adds a reduced shard to the kept one, or replaces it.
  void keep_reduced(View& reduced);

  const Context& c_;
  const GroupFacts& facts_;
  const int group_;
  bool first_ = true, boundary_ = true, squared_ = false;
  View kept_, copied_, pending_, copy_;
  Pending work_;

 private:
  void give_all();

  std::vector<char> active_, taken_;  // by member
  int awaited_ = 0;
  bool reduces_ = false;  // begin_reduce() has begun a reduction
};

}  // namespace zero::step
