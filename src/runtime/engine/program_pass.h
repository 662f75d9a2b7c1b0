// Passes whose backward() is the program's: loss.backward() of torch in place of Engine::backward(). A hook of autograd
// begins one, and it ends with that backward.
//
// [Note: begin and end] A hook on an output of the forward begins the pass before any parameter is read. A graph that
// does not come from such an output begins it with its first gradient, in a hook of the parameter that autograd calls
// before it accumulates. Autograd calls a callback when a backward is complete; of one that failed it only frees it.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "engine/backward.h"

namespace zero::engine {

class ProgramPass {
 public:
  ProgramPass(Parts& parts, Backward& backward);
  ~ProgramPass();
  ProgramPass(const ProgramPass&) = delete;
  ProgramPass& operator=(const ProgramPass&) = delete;

  // From now on a backward() of the program is a pass.
  void accept();
  // The same for the backward of `output`, which begins the pass.
  void follow(const at::Tensor& output);
  // The loss, fp32, times the loss scale; its backward() is a pass of a run in fp16.
  at::Tensor scale(const at::Tensor& loss);

 private:
  struct Link;  // shared with hooks, which may live longer
  struct End;

  at::Tensor before_gradient(int group, int member, const at::Tensor& gradient);
  bool reaches_parameters() const;
  void begin();

  Parts& p_;
  Backward& backward_;
  std::shared_ptr<Link> link_;
  std::vector<std::vector<std::optional<unsigned>>> hooks_;  // by group and member; none: a tensor of inference mode
};

}  // namespace zero::engine
