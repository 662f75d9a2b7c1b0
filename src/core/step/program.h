// The order of operations of a training step, for every sharding policy, precision, tier and axis: written here and
// nowhere else. Events come from outside (a parameter is used, a gradient arrives, step() is called), operations go to
// the backend, bytes to Memory. What tensors are, and which model it is, is not known here.
#pragma once
#include <atomic>
#include <deque>
#include <functional>
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

// One backward: a micro-batch is one, or several of which all but the last retain it.
struct PassOptions {
  bool retains = false;      // the micro-batch goes on with another pass
  bool keeps_graph = false;  // its gradients stay with autograd until a later pass brings them
  bool recoverable = false;  // a copy of the micro-batches before lets discard_micro_batch() drop this one alone
};

// What was added up since the last step. Whole micro-batches count when their last pass ends.
struct Accumulation {
  std::int64_t micro_batches = 0, passes = 0, taken_passes = 0;  // taken: whose gradients are kept
  bool open = false;                                             // the last micro-batch goes on
  bool touched = false;                                          // it has had a gradient
};

// One call at a time, but begin_use() and end_use(), which any thread may call.
class StepProgram {
 public:
  // Makes every buffer that rests. `memory`, `scaler`, `observer` and the backend outlive it. `diverged`: a pass uses
  // groups in another order than the one before, from this group on.
  StepProgram(
      const RunFacts& facts, const std::vector<GroupFacts>& groups, Backend backend, Memory& memory,
      optim::LossScaler& scaler, Observer& observer,
      std::function<void(const std::string& group)> diverged = [](const std::string&) {});

  // First values of a group: fp32, of all its elements, on every rank; `broadcast`: rank 0's count.
  void initialise(int group, View values, bool broadcast);

  // An operator is about to read these groups' parameters; when this returns they may be read, until another use needs
  // the room. training: part of a pass that ends in a backward, so its order is worth learning.
  void use(std::span<const int> groups, bool training);
  // The same, and they stay until end_use(), whatever other threads use.
  void begin_use(std::span<const int> groups, bool training);
  void end_use(std::span<const int> groups) noexcept;
  // Forward is over.
  void begin_backward(const PassOptions& pass = {});
  // Between begin_backward() and end_backward(). peer_readable: see GradStorage::take(). Not of a pass that keeps its
  // graph, in which note_gradient() says that there was one.
  void gradient(int group, int member, View arrived, bool peer_readable);
  void note_gradient() { accumulated_.touched = true; }
  // False: the member had its gradient in this pass, and the group has been reduced since.
  bool accepts_gradient(int group, int member) const;
  // Every gradient has arrived. Returns the members (group, index) that had none: they count as zeros. Nothing of a
  // pass that keeps its graph.
  std::vector<std::pair<int, int>> fill_missing();
  // Does the same if it was not done. All reductions are done and all groups resharded when this returns.
  void end_backward();
  // No more gradients arrive, by an error: until discard_micro_batch() nothing but it may be called.
  void interrupt_backward() { c_.memory.open_blocks(false); }
  // Drops the micro-batch under way, also in the middle of a backward that failed: it never was. What it has added to
  // those before cannot be told apart, so without a copy they go with it. Returns what is left of them.
  KeptGrads discard_micro_batch();
  // Between steps: whether a member (group, index) is trained. One that is not is not awaited in backward, and counts
  // as zeros.
  void set_active(int group, int member, bool active);
  // The update, at a boundary; else nothing.
  StepOutcome step();

  // Between steps, by all ranks: a delayed update becomes visible, nothing is under way.
  void flush();
  // The job of a delayed update has ended; what it throws is thrown. It is not visible yet.
  void join_update();
  // Between steps: states are about to be replaced by a load. A delayed update is dropped.
  void begin_replacing();
  // After masters were replaced: parameters are made of them on all ranks.
  void end_replacing();
  // Between steps: a group that was frozen is trained from now on, as `facts` says. Without effect when it throws.
  void admit(int group, const GroupFacts& facts);

  bool at_boundary() const;
  // A delayed update is on its way, or waits to become visible.
  bool update_pending() const { return pending_; }
  const Accumulation& accumulated() const { return accumulated_; }
  // Steps that were taken, with those that an overflow skipped; of a run that goes on, those before.
  std::int64_t steps() const { return step_; }
  void set_steps(std::int64_t steps) { step_ = steps; }
  void forget_accumulated() { accumulated_ = {}; }

  const Groups& groups() const { return groups_; }
  Prefetcher& prefetcher() { return *prefetcher_; }
  OptimizerStep& optimizer() { return *optimizer_; }

 private:
  bool delays() const { return delayed_ && step_ >= facts_.delayed_start; }
  void order_reductions();
  void make_optimizer_step();
  void save_copies();
  void drop_copies();
  void serve_blocks();
  void reduce_ready();
  void finish_reductions(std::size_t most_in_flight);
  StepOutcome norm_and_overflow();
  void apply(float factor, bool delay);
  bool finish_delayed();
  void all_gather(Group& group);
  void finish_all_gathers(std::int64_t numel_under_way);

  const RunFacts facts_;
  std::vector<GroupFacts> group_facts_;
  const Context c_;
  optim::LossScaler& scaler_;
  Groups groups_;
  std::unique_ptr<OptimizerStep> optimizer_;
  std::unique_ptr<step::Prefetcher> prefetcher_;
  std::vector<Group*> reduce_order_;
  std::deque<Group*> reducing_, gathering_;  // under way, the oldest first
  std::size_t reduce_next_ = 0;              // in reduce_order_
  PassOptions pass_;
  Accumulation accumulated_, copied_;  // copied_: at the copy; no taken passes: there is none
  std::int64_t step_ = 0;
  bool unshards_ = false, delayed_ = false;  // some group does
  std::atomic<bool> pending_ = false;        // a delayed update has begun and is not visible yet
  bool reads_ahead_ = false;
};

}  // namespace zero::step
