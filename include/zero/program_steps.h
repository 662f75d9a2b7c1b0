// For a program with a loop of its own: it calls loss.backward() of torch, and decides which step() updates.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/export.h>

namespace zero {

class Engine;
namespace engine {
class State;
}

class ZERO_API ProgramSteps {
 public:
  // Valid also after the Engine has moved.
  explicit ProgramSteps(Engine& engine);
  ~ProgramSteps();
  ProgramSteps(const ProgramSteps&) = delete;
  ProgramSteps& operator=(const ProgramSteps&) = delete;

  // [local] From now on a backward() of torch that reaches the Engine's parameters is what Engine::backward() of that
  // loss would be, and collective like it: gradients are divided by the number of accumulation steps. In fp16 only of a
  // loss of scale(). Errors come out of that backward(). One that fails is a failed Engine::backward(). Not with tensor
  // parallelism. torch::autograd::grad() changes nothing.
  void accept_backward();
  // [local] After accept_backward(), with gradient_accumulation_steps 1: a step that begins with a backward() of torch
  // may have several, whose gradients add up until step(), as in torch. One that begins with Engine::backward() has
  // one.
  void add_up();
  // [collective] Between the last backward() and step(): the norm of all gradients that step() will use, without the
  // loss scale, before clipping; -1 where it is not finite.
  double grad_norm();
  // [collective] The same, after clip_grad_norm() calls before. The update is then clipped to the smallest max_norm of
  // the step, in place of gradient_clipping; infinity: not clipped. ConfigError for a negative max_norm.
  double clip_grad_norm(double max_norm);
  // [local] On all ranks, for a program that clips the gradients itself: the limit of clip_grad_norm() calls of the
  // step, after which the update is not clipped. None: there was no call, and nothing changes.
  std::optional<double> take_clip();
  // [local] Between steps, on all ranks: changes "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening" or
  // "lr_decay" of a parameter group (0, or the number of its pattern in libzero.parameter_groups) from the next update
  // on. Ranks compare it; checkpoints do not store it. ConfigError for a name or number that the built-in rule cannot
  // have.
  void set_number(int group, const std::string& name, double value);
  // [local] On all ranks: drops the gradients of the step so far. No effect if there are none.
  void discard_gradients();
  // [local] Call for the outputs of a forward, after accept_backward(): the backward of `output` is known to be one
  // from its beginning, which reentrant checkpointing needs, and learns the order of units at stage 3.
  void follow(const at::Tensor& output);
  // [local] The loss, fp32, times the loss scale.
  at::Tensor scale(const at::Tensor& loss);
  // [local] Before a step's first backward(), on all ranks: whether the step ends after the configured number of
  // micro-batches, or when step() is called. ConfigError within a step.
  void count_micro_batches(bool counts);
  // [local] Before a step's first backward(), on all ranks: from now on gradients are divided by `steps`, and the step
  // ends when step() is called. ConfigError within a step.
  void set_accumulation_steps(std::int64_t steps);
  // [local] Before the first backward(), on all ranks: these parameters are never updated, whatever their requires_grad
  // says, and their gradients stay in .grad. Of tied parameters the first name. Other names, as of experts that other
  // ranks run, have no effect.
  void leave_out(const std::vector<std::string>& names);

 private:
  std::shared_ptr<engine::State> state_;
};

}  // namespace zero
