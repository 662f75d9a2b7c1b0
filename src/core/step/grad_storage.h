// The gradients of one group from their arrival to the update: where they are stored and how they are reduced over the
// ranks of the axis. One strategy per GradStorageKind. The program decides when a group is reduced.
#pragma once
#include <memory>
#include <vector>

#include "step/context.h"

namespace zero::step {

// The accumulated gradients that remain when a micro-batch is discarded before its end.
enum class KeptGrads {
  All,   // the micro-batch has added nothing yet
  Copy,  // save_copy()
  None,
};

class GradStorage {
 public:
  // `context` and `facts` must outlive the result. Allocates its persistent buffers.
  static std::unique_ptr<GradStorage> make(const Context& context, const GroupFacts& facts, int group);
  virtual ~GradStorage();

  // Whether a member is trained; others are not awaited and count as zeros. Call between passes, within a step with
  // true only. Initially all are.
  void set_active(int member, bool active) { active_[static_cast<std::size_t>(member)] = active; }
  // first: nothing was accumulated since the last step. boundary: this pass is reduced for the update.
  void begin_micro_step(bool first, bool boundary);
  // False: the member had its gradient, and the group was reduced since.
  bool accepts(int member) const;
  bool taken(int member) const { return taken_[static_cast<std::size_t>(member)] != 0; }
  // A gradient has arrived. peer_readable: peers can read it in place, and its memory is not shared. Returns true if it
  // was the last one awaited.
  bool take(int member, View arrived, bool peer_readable);
  // Returns active members without a gradient; from now on they count as zeros.
  std::vector<int> fill_missing();
  bool all_taken() const { return awaited_ == 0; }

  void begin_reduce();
  void finish_reduce();
  bool reduced() const { return work_.done(); }
  // The last micro-batch turned out to be the boundary: reduces gradients that were stored unreduced.
  void close_accumulation();

  // Between the reduction for the update and step(): replaces elements [begin, begin + values.numel) of a member, which
  // must be in the owned range. `values` are scaled like the sum. A gradient that is missing becomes zeros before.
  void replace(int member, std::int64_t begin, const View& values);

  // Copies the accumulated gradients until drop_copy() or discard(KeptGrads::Copy).
  virtual void save_copy();
  virtual void drop_copy();
  // Ends a pass before its end, also after an error.
  void discard(KeptGrads kept);

  // Before a delayed update: the reduced gradients become the update's source, and their buffer is free for the next
  // step.
  void hand_over();
  // What the update reads: the owned range, or the whole vector. None: the members' .grad.
  View source() const { return pending_ ? pending_ : sum(); }
  // The same for the last reduction.
  View sum() const { return copied_ ? copied_ : kept_; }
  // The member's .grad if sum() is none; none if it has no gradient.
  virtual View kept(int /*member*/) const { return {}; }
  // The same; allocates zeros if it has no gradient.
  virtual View kept_or_zeros(int member) { return kept(member); }
  // Call after the step.
  virtual void clear();

 protected:
  GradStorage(const Context& context, const GroupFacts& facts, int group);
  virtual void keep(int member, View arrived, bool peer_readable, bool again) = 0;
  virtual void fill(int member) = 0;
  virtual bool start_reduce() = 0;  // false: nothing to reduce now
  virtual void end_reduce() {}
  virtual void drop() {}  // releases what is held during a pass or a reduction
  virtual void restore_copy();
  virtual void copy_to_host() = 0;
  // Stores the sum of squares of the reduced gradients: of this rank's part of `flat`, or of the members if it is none.
  virtual void square(const View& flat);
  // Elements at the beginning of this rank's shard that another tensor-parallel rank counts.
  std::int64_t uncounted() const;

  View rest(Tier tier, Role role, std::int64_t numel) const;
  // Starts the operation that finish_reduce() waits for.
  void observe_reduce(bool to_all);
  const Axis& axis() const { return c_.facts.axis_of(facts_); }
  const MixedPrecisionPolicy& precision() const { return facts_.precision; }
  std::int64_t shard_begin() const { return c_.facts.shard_begin(facts_); }
  std::int64_t numel_of(int member) const { return facts_.layout.parameter_numel(static_cast<std::size_t>(member)); }
  // Whether the first sum of a step can be written directly to its final buffer.
  bool sums_straight() const { return first_ && precision().grad == precision().reduce; }
  View own_part(const View& flat) const;
  // Adds a reduced shard to the stored one, or replaces it.
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
  bool reduces_ = false;  // begin_reduce() has started a reduction
};

}  // namespace zero::step
