// Backward: passes of micro-batches, the gradients they bring, and what is left of a pass that failed. When gradients
// are reduced is the step program's.
//
// [Note: passes] A micro-batch is one backward() or, with retain_graph, several: each is a pass. What passes bring adds
// up like micro-batches do: under stages 0 and 1 on each rank, reduced once, under 2 and 3 reduced pass by pass.
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
  // The micro-batch ends without another loss: what passes before have left is taken.
  void close_micro_batch() { run_pass(at::Tensor(), {}); }
  std::int64_t discard_micro_batch();
  void on_gradient(int group, int member);

  // Groups taken frozen of which a parameter requires grad by now can be trained from now on, once the ranks have
  // compared which (collective; ConfigError on all when they differ).
  void compare_unfrozen(const char* call);
  void admit_unfrozen();

 private:
  void run_pass(const at::Tensor& loss, const BackwardOptions& options);
  void run_autograd(const at::Tensor& loss, const BackwardOptions& options);
  void take(int group, int member);
  void take_waiting();
  void note_unused(const std::vector<std::pair<int, int>>& missing, bool within, bool check);
  std::vector<std::string> reduced_names() const;
  std::string unfrozen_units() const;
  void choose_active();
  void give_up(const std::string& error) noexcept;
  void drop_micro_batch();

  Parts& p_;
  const Checks& checks_;
  ForwardListener& listener_;
  std::vector<std::string> unused_;  // parameters that the micro-batch had no gradient for
  bool keeps_graph_ = false;
};

}  // namespace zero::engine
