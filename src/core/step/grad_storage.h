// The gradients of one group, from their arrival to the update: where they are kept and how they are reduced over the
// ranks of the axis. Three strategies, by GradStorageKind. When a group is reduced is the program's decision.
#pragma once
#include <memory>
#include <vector>

#include "step/context.h"

namespace zero::step {

class GradStorage {
 public:
  // `context` and `facts` outlive the result, which makes its resting buffers.
  static std::unique_ptr<GradStorage> make(const Context& context, const GroupFacts& facts, int group);
  virtual ~GradStorage() = default;

  // Whether a member is trained; one that is not is not awaited and counts as zeros. Between steps; all are at first.
  void set_active(int member, bool active) { active_[static_cast<std::size_t>(member)] = active; }
  // first: nothing has been accumulated since the last step. boundary: what this pass adds is reduced for the update.
  void begin_micro_step(bool first, bool boundary);
  // A gradient has arrived. peer_readable: peers can read it where it is, and nothing else shares its memory. True: it
  // was the last one awaited. ConfigError for a second gradient of a parameter after the group was reduced.
  bool take(int member, View arrived, bool peer_readable);
  // Active members without a gradient, which count as zeros from now on.
  std::vector<int> fill_missing();
  bool all_taken() const { return awaited_ == 0; }

  void begin_reduce();
  void finish_reduce();
  bool reduced() const { return !work_ || work_->done(); }
  // The last micro-batch was the boundary after all: reduces what was kept whole.
  void close_accumulation();

  // Drops what has arrived since the last step, also in the middle of a pass that failed.
  void discard();

  // Before a delayed update: what was reduced becomes what the update reads, and its buffer is free for the next step.
  void hand_over();
  // What the update reads: the owned range, or the whole vector. None: the members' own .grad.
  View source() const { return pending_ ? pending_ : copied_ ? copied_ : kept_; }
  // After the step.
  virtual void clear() {}

 protected:
  GradStorage(const Context& context, const GroupFacts& facts, int group);
  virtual void keep(int member, View arrived, bool peer_readable, bool again) = 0;
  virtual void fill(int member) = 0;
  virtual WorkPtr start_reduce() = 0;  // nullptr: nothing to reduce now
  virtual void end_reduce() {}
  virtual void drop() = 0;  // what is held until or during a reduction
  virtual void copy_to_host() = 0;
  virtual void square() = 0;

  void observe_reduce(bool to_all) const;
  const Axis& axis() const { return c_.facts.axis_of(facts_); }
  const MixedPrecisionPolicy& precision() const { return c_.facts.precision; }
  std::int64_t shard_begin() const { return axis().rank * facts_.shard(); }
  std::int64_t numel_of(int member) const { return facts_.layout.parameter_numel(static_cast<std::size_t>(member)); }
  // The first sum of a step can be made where it is kept.
  bool sums_straight() const { return first_ && precision().grad == precision().reduce; }
  View own_part(const View& flat) const;
  // Adds a reduced shard to the kept one, or replaces it.
  void keep_reduced(View& reduced);

  const Context& c_;
  const GroupFacts& facts_;
  const int group_;
  bool first_ = true, boundary_ = true, squared_ = false;
  View kept_, copied_, pending_;

 private:
  std::vector<char> active_, taken_;  // by member
  int awaited_ = 0;
  WorkPtr work_;
};

}  // namespace zero::step
