// Argument and result types of Engine. See engine.h.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/export.h>

namespace torch::nn {
class Module;
}

namespace zero {

class UpdateRule;  // update_rule.h
class Engine;
namespace engine {
class State;
}

// A module: a std::shared_ptr to one, or a module holder (TORCH_MODULE). Converts from both.
struct ModuleHandle {
  template <class M>
  ModuleHandle(std::shared_ptr<M> pointer) : module(std::move(pointer)) {}
  template <class Holder>
  requires requires(Holder holder) { std::shared_ptr<torch::nn::Module>(holder.ptr()); }
  ModuleHandle(const Holder& holder) : module(holder.ptr()) {}
  std::shared_ptr<torch::nn::Module> module;
};

// The result of Engine::step().
struct StepResult {
  bool updated = false;          // false between accumulation boundaries and after an overflow
  bool overflow = false;         // some rank had a non-finite gradient; nothing was updated
  double grad_norm = 0;          // global L2 norm before clipping, without the loss scale; -1 if not finite
  double loss_scale = 1;         // used by the next backward()
  double lr = 0;                 // learning rate that this step used (parameter group 0)
  std::int64_t global_step = 0;  // attempted steps, including this one
};

struct BackwardOptions {
  // Keeps the graph, and the micro-batch open, for several losses of one forward with one backward() each. The first
  // backward() without retain_graph, or step(), ends the micro-batch.
  bool retain_graph = false;
  // Builds a graph of the gradients and leaves them in .grad, for a loss that contains gradients. They are this rank's,
  // not reduced. Implies retain_graph. ConfigError unless a step has one micro-batch and the loss scale is 1. If the
  // loss only needs gradients of other tensors than parameters, use torch::autograd::grad(..., create_graph), which has
  // no such limits.
  bool create_graph = false;
  // With gradient accumulation: keeps a copy of the sums of the previous micro-batches, on the same tier, until this
  // micro-batch has ended. If it fails, the sums are restored. Without the copy they are discarded with it.
  bool recoverable = false;
  // The loss is a sum over the tokens (or samples) of this rank that count, and this is their number. It may differ
  // between ranks and be 0. The gradient is that of the sum over all ranks divided by the number on all ranks; without
  // tokens on any rank it is zero. If not given, the loss is a mean, and every rank counts equally. All ranks give it
  // or none does. [collective] One small message.
  std::optional<std::int64_t> tokens = std::nullopt;
};

struct SaveOptions {
  // Masters, frozen parameters and buffers alone. Such a checkpoint loads with LoadOptions::weights_only; a load
  // without a tag skips it, it is never the `latest`, and it does not replace one that can be resumed from.
  bool weights_only = false;
  // Without frozen parameters: those of a base model, which the program loads before the engine. A load has to name
  // them in LoadOptions::partial, and they keep their values.
  bool exclude_frozen = false;
};

// What load_checkpoint() takes. (DeepSpeed: load_module_only, load_optimizer_states, load_lr_scheduler_states.)
struct LoadOptions {
  // Masters, frozen parameters and buffers alone: for another type of optimizer, and for checkpoints of weights only.
  // States of the optimizer start at their initial values; steps, samples and updates are 0, and the loss scale is the
  // configuration's. Learning rates that were set, random numbers and user_state() stay. A parameter may be frozen here
  // and trained in the checkpoint. Without a tag, the newest complete checkpoint of either kind is loaded.
  bool weights_only = false;
  // Parameters and buffers, by pattern (* matches any text, {i} a number), that may be missing in the checkpoint, have
  // another shape there, or be missing in the model. They keep their values; states of the optimizer for them start at
  // their initial values, as for a parameter that was never updated.
  std::vector<std::string> partial = {};
};

// This rank's shard of one parameter's gradient or state.
struct OwnShard {
  std::int64_t begin = 0;  // offset of `values` in the flattened parameter, in elements
  at::Tensor values;       // fp32, flat; may be empty. Undefined if the parameter is frozen
};

using OwnGradient [[deprecated("OwnShard")]] = OwnShard;

// A scope of Engine::gathered_parameters(). During its life, every rank has the whole parameters of the scope's units,
// in memory of their own, in their shape and the recipe's compute dtype. Raw pointers may be taken. Parameters of other
// units are unaffected. In a scope that modifies, rank 0 may write the parameters in place (copy_, mul_; not
// torch::load, which replaces the tensors), and at its end rank 0's values are copied to all ranks. Scopes may be
// nested and their units may overlap. backward(), step() and load_checkpoint() throw in any scope, save_checkpoint() in
// one that modifies.
class [[nodiscard]] ZERO_API GatheredParameters {
 public:
  GatheredParameters(GatheredParameters&&) noexcept;  // local
  GatheredParameters& operator=(GatheredParameters&&) = delete;
  // Calls close(); errors are logged instead of thrown.
  ~GatheredParameters();
  // Ends the scope. Collective and blocking if it modifies, else local. Throws CommError, IoError, and ConfigError if a
  // parameter was replaced in the scope. A second call has no effect.
  void close();

 private:
  friend class Engine;
  GatheredParameters(std::shared_ptr<engine::State> state, std::vector<int> groups, bool modify);
  std::shared_ptr<engine::State> state_;
  std::vector<int> groups_;
  bool modify_;
};

}  // namespace zero
