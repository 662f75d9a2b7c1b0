// The order of operations of a training step, for every sharding policy, precision, tier and axis; no other code
// defines it. Events arrive (a parameter is used, a gradient arrives, step() is called); operations go to the backend
// and bytes to Memory. Independent of tensors and of the model.
#pragma once
#include <atomic>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "optim/loss_scaler.h"
#include "step/optimizer_step.h"

namespace zero::step {

struct StepOutcome {
  bool acted = false;     // at a boundary; false: nothing was done
  bool updated = false;   // parameters have new values
  bool overflow = false;  // gradients were not finite; the update was skipped
  bool give_up = false;   // too many consecutive overflows: the run has to end
  double norm = 0;        // of the unscaled gradients, before clipping; -1: not finite
};

// One backward pass. A micro-batch has one, or several of which all but the last retain it.
struct PassOptions {
  bool retains = false;      // the micro-batch has further passes
  bool keeps_graph = false;  // gradients stay with autograd until a later pass takes them
  bool recoverable = false;  // copies the previous micro-batches, so that discard_micro_batch() can drop this one alone
};

// The gradients accumulated since the last step. A micro-batch counts when its last pass ends.
struct Accumulation {
  std::int64_t micro_batches = 0, passes = 0, taken_passes = 0;  // taken: passes whose gradients are stored
  bool open = false;                                             // the last micro-batch has not ended
  bool touched = false;                                          // it has had a gradient
  bool closed = false;                                           // see close_accumulation()
  std::optional<double> squares, clip;                           // see norm() and clip()
};

// Not thread-safe, except begin_use() and end_use().
class StepProgram {
 public:
  // Allocates every persistent buffer. `memory`, `scaler`, `observer` and the backend must outlive it. `diverged` is
  // called with the first group of a pass whose order differs from that of the pass before.
  StepProgram(
      const RunFacts& facts, const std::vector<GroupFacts>& groups, Backend backend, Memory& memory,
      optim::LossScaler& scaler, Observer& observer,
      std::function<void(const std::string& group)> diverged = [](const std::string&) {});

  // Initial values of a group: fp32, all elements, on every rank. broadcast: uses rank 0's.
  void initialise(int group, View values, bool broadcast);
  // The same by and by: fp32 values of the elements from `begin` on, equal on every rank; then, when all have been
  // given, the rest.
  void initialise_part(int group, std::int64_t begin, View values);
  void complete_initialisation(int group);

  // An operator is about to read these groups' parameters. They may be read when this returns, until another use needs
  // the memory. training: part of a pass that ends in a backward, so its order is learned.
  void use(std::span<const int> groups, bool training);
  // The same; they stay until end_use(), regardless of other threads.
  void begin_use(std::span<const int> groups, bool training);
  void end_use(std::span<const int> groups) noexcept;
  // Forward has ended.
  void begin_backward(const PassOptions& pass = {});
  // Call between begin_backward() and end_backward(). peer_readable: see GradStorage::take(). In a pass that keeps its
  // graph, call note_gradient() instead.
  void gradient(int group, int member, View arrived, bool peer_readable);
  void note_gradient() { accumulated_.touched = true; }
  // False: the member had its gradient in this pass, and the group was reduced since.
  bool accepts_gradient(int group, int member) const;
  // Call when every gradient has arrived. Returns the members (group, index) without one, which count as zeros. Returns
  // nothing in a pass that keeps its graph.
  std::vector<std::pair<int, int>> fill_missing();
  // Calls fill_missing() if needed. When this returns, all reductions are complete and all groups resharded.
  void end_backward();
  // An error ended backward. Only discard_micro_batch() may follow.
  void interrupt_backward() { c_.memory.open_blocks(false); }
  // Between micro-batches: reduces the accumulated gradients for the update, where their number is not known before
  // step(). Only step() may follow. No effect otherwise, and when called again.
  void close_accumulation();
  // [collective] At a boundary, before step(): the norm that step() will find, without the loss scale; -1 when it is
  // not finite. step() does not compute it again.
  double norm();
  // Call after a gradient of the step was replaced.
  void forget_norm() { accumulated_.squares.reset(); }
  // The maximum norm of this step's update, in place of RunFacts::clip.
  void clip(double max_norm) { accumulated_.clip = max_norm; }
  // What clip() has set; the update is not clipped then. None: nothing, and RunFacts::clip stays.
  std::optional<double> take_clip() {
    return accumulated_.clip ? std::exchange(accumulated_.clip, std::numeric_limits<double>::infinity()) : std::nullopt;
  }
  // Discards all micro-batches of the step.
  void discard_gradients() { discard(/*everything=*/true); }
  // Discards the current micro-batch, also during a failed backward; those that are complete remain. If it has already
  // been added to the previous micro-batches, these are discarded too unless a copy exists. Returns what remains of
  // them.
  KeptGrads discard_micro_batch() { return discard(/*everything=*/false); }
  // Call between passes: whether a member (group, index) is trained; within a step only true. Others are not awaited in
  // backward and count as zeros.
  void set_active(int group, int member, bool active);
  // Updates at a boundary; otherwise no effect.
  StepOutcome step();

  // Call between steps, on all ranks: completes a delayed update. No operation is pending afterwards.
  void flush();
  // Waits for the job of a delayed update and rethrows its exception. The update is not visible yet.
  void join_update();
  // Call between steps, before a load replaces states. Drops a delayed update.
  void begin_replacing();
  // Call after masters were replaced, of all groups or of one only: recomputes parameters on all ranks.
  void end_replacing(int only = -1);
  // Call between passes: a frozen group becomes trainable, as `facts` describes. No effect if it throws.
  void admit(int group, const GroupFacts& facts);

  bool at_boundary() const;
  // Call before a step's first pass: whether the step ends after facts.accumulation micro-batches, or when step() is
  // called.
  void count_micro_batches(bool counts) { counts_ = counts; }
  bool counts_micro_batches() const { return counts_; }
  // A delayed update is running, or not yet visible.
  bool update_pending() const { return pending_; }
  const Accumulation& accumulated() const { return accumulated_; }
  // Steps taken, including skipped ones and those before a resume.
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
  KeptGrads discard(bool everything);
  StepOutcome outcome_of(double total) const;
  double sum_of_squares();
  void begin_apply(std::optional<float> factor);
  void apply();
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
  std::deque<Group*> reducing_, gathering_;  // pending, oldest first
  std::size_t reduce_next_ = 0;              // in reduce_order_
  PassOptions pass_;
  bool counts_ = true;
  bool in_pass_ = false;               // from begin_backward() to its end_backward() or discard_micro_batch()
  Accumulation accumulated_, copied_;  // copied_: state at the copy; taken_passes == 0: no copy
  std::int64_t step_ = 0;
  std::int64_t kept_ = 0;                    // bytes that are booked for kept snapshots
  bool unshards_ = false, delayed_ = false;  // for some group
  std::atomic<bool> pending_ = false;        // a delayed update has started and is not visible yet
  bool reads_ahead_ = false;
};

}  // namespace zero::step
