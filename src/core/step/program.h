// The order of operations of a training step, for every sharding policy, precision, tier and axis: written here and
// nowhere else. Events come from outside (a parameter is used, a gradient arrives, step() is called), operations go to
// the backend, bytes to Memory. What tensors are, and which model it is, is not known here.
#pragma once
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "optim/loss_scaler.h"
#include "step/optimizer_step.h"

namespace zero::step {

struct StepOutcome {
  bool acted = false;     // at a boundary: else nothing was done
  bool updated = false;   // parameters have new values
  bool overflow = false;  // gradients were not finite, and the update was skipped
  bool give_up = false;   // too many such steps in a row: the run has to end
  double norm = 0;        // of the unscaled gradients, before clipping; -1: not finite
};

// One call at a time.
class StepProgram {
 public:
  // Makes every buffer that rests. `memory`, `scaler`, `observer` and the backend outlive it.
  StepProgram(const RunFacts& facts, const std::vector<GroupFacts>& groups, Backend backend, Memory& memory,
              optim::LossScaler& scaler, Observer& observer);

  // First values of a group: fp32, of all its elements, on every rank; `broadcast`: rank 0's count.
  void initialise(int group, View values, bool broadcast);

  // An operator is about to read these groups' parameters; when this returns they may be read, until another use needs
  // the room. training: part of a pass that ends in a backward, so its order is worth learning.
  void use(std::span<const int> groups, bool training);
  // Forward is over.
  void begin_backward();
  // Between begin_backward() and end_backward(). peer_readable: see GradStorage::take().
  void gradient(int group, int member, View arrived, bool peer_readable);
  // All reductions are done and all groups resharded. Returns the members (group, index) that had no gradient; they
  // count as zeros.
  std::vector<std::pair<int, int>> end_backward();
  // Drops what has been accumulated since the last step: also in the middle of a backward that failed.
  void discard_micro_batches();
  // Between steps: whether a member (group, index) is trained. One that is not is not awaited in backward, and counts
  // as zeros.
  void set_active(int group, int member, bool active);
  // The update, at a boundary; else nothing.
  StepOutcome step();

  // Between steps, by all ranks: a delayed update becomes visible, nothing is under way.
  void flush();
  // Between steps: states are about to be replaced by a load. A delayed update is dropped.
  void begin_replacing();
  // Between steps: all parameters are whole, in memory that may be written, until end_unsharded().
  void begin_unsharded();
  void end_unsharded();

  bool at_boundary() const;
  const Groups& groups() const { return groups_; }
  OptimizerStep& optimizer() { return *optimizer_; }
  // Of a run that goes on: steps that were taken before.
  void set_step(std::int64_t step) { step_ = step; }

 private:
  bool delays() const { return delayed_ && step_ >= facts_.delayed_start; }
  void serve_blocks();
  void reduce_ready();
  void finish_reductions(std::size_t most_in_flight);
  StepOutcome norm_and_overflow();
  void apply(float factor, bool delay);
  bool finish_delayed();
  void all_gather(Group& group);
  void finish_all_gathers(std::int64_t numel_under_way);

  const RunFacts facts_;
  const std::vector<GroupFacts> group_facts_;
  const Context c_;
  optim::LossScaler& scaler_;
  Groups groups_;
  std::unique_ptr<OptimizerStep> optimizer_;
  std::unique_ptr<step::Prefetcher> prefetcher_;
  std::vector<Group*> reduce_order_;
  std::deque<Group*> reducing_, gathering_;  // under way, the oldest first
  std::size_t reduce_next_ = 0;              // in reduce_order_
  std::int64_t micro_step_ = 0, step_ = 0;
  bool unshards_ = false, delayed_ = false;  // some group does
  bool pending_ = false;                     // a delayed update has begun and is not visible yet
  bool reads_ahead_ = false;
};

}  // namespace zero::step
