// Backward: the backward passes of micro-batches, their gradients, and cleanup after a failed pass. The step program
// decides when gradients are reduced.
//
// [Note: passes] A micro-batch is one backward() or, with retain_graph, several; each is a pass. Passes accumulate as
// micro-batches do: at stages 0 and 1 on each rank, with one reduction; at stages 2 and 3 each pass is reduced.
// Gradients of a pass with create_graph stay in .grad until a later pass takes them.
#pragma once
#include <string>
#include <vector>

#include "engine/forward_listener.h"

namespace zero::engine {

class Backward {
 public:
  Backward(Parts& parts, const Checks& checks, ForwardListener& listener)
      : p_(parts), checks_(checks), listener_(listener) {}

  void run(const at::Tensor& loss, const BackwardOptions& options);
  // Ends the micro-batch without another loss: takes the gradients that earlier passes left.
  void close_micro_batch() { run_pass(at::Tensor(), {}); }
  // A pass whose backward() is the program's: from begin to end gradients are the pass's. Collective, as run().
  void begin_program_pass(const BackwardOptions& options);
  void end_program_pass(const BackwardOptions& options);
  void fail_program_pass() noexcept;
  std::int64_t discard_micro_batch();
  // [local] Drops the gradients of all micro-batches of the step.
  void discard_gradients();
  // Before a pass, in a run with one micro-batch a step: by_program: several passes of loss.backward() add up until
  // step(). No effect within a step.
  void choose_counting(bool by_program);
  // Whether this rank's losses of the step, or of the last one, are finite. Waits for them.
  bool losses_are_finite() const;
  void on_gradient(int group, int member);

  // Groups that were frozen at construction but now have a parameter that requires grad: compares them over ranks
  // (collective; ConfigError on all ranks if they differ), then makes them trainable.
  void compare_unfrozen(const char* call);
  void admit_unfrozen();

 private:
  template <class Fn>
  void guarded(Fn&& fn);
  void run_pass(const at::Tensor& loss, const BackwardOptions& options);
  void begin_pass(const at::Tensor& loss, const BackwardOptions& options);
  void end_pass(const BackwardOptions& options, bool check);
  void compare_losses(const at::Tensor& loss);
  void warn_of_unused_sequence();
  double weight_of(const BackwardOptions& options) const;
  void run_autograd(const at::Tensor& loss, const BackwardOptions& options, double weight);
  void take(int group, int member);
  void take_waiting();
  void note_unused(const std::vector<std::pair<int, int>>& missing, bool within, bool check);
  std::vector<std::string> reduced_names() const;
  std::string unfrozen_units() const;
  void choose_active(bool first);
  void give_up(const std::string& error) noexcept;
  void drop_micro_batch();

  Parts& p_;
  const Checks& checks_;
  ForwardListener& listener_;
  std::vector<std::string> unused_;  // parameters without a gradient in this micro-batch
  bool losses_are_finite_ = true;    // of this step's passes on a CPU
  std::vector<at::Tensor> losses_;   // of those on a GPU, which are not waited for; without their graphs
  bool keeps_graph_ = false, compared_losses_ = false, looked_for_sequence_ = false;
};

}  // namespace zero::engine
