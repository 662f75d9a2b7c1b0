// What calls of an Engine take and return. See engine.h.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <zero/export.h>

namespace zero {
class Engine;
namespace engine {
class State;
}

// What one call of Engine::step() did.
struct StepResult {
  bool updated = false;          // false between accumulation boundaries and on overflow
  bool overflow = false;         // a non-finite gradient on some rank: nothing was changed
  double grad_norm = 0;          // global L2 norm before clipping, unscaled; -1 when not finite
  double loss_scale = 1;         // the scale the next backward will use
  double lr = 0;                 // the rate this step used (first parameter group)
  std::int64_t global_step = 0;  // attempted steps, this one included
};

struct BackwardOptions {
  // The graph is kept for another backward(), and the micro-batch stays open: several losses of one forward, one
  // backward() each. The one without retain_graph ends the micro-batch, or step() does.
  bool retain_graph = false;
  // Gradients get a graph of their own, and stay in .grad for a loss that is made of them; retain_graph is implied.
  // They are this rank's, not reduced. One micro-batch a step and a loss scale of 1 only: ConfigError. Where the loss
  // needs gradients of something else than parameters, torch::autograd::grad(..., create_graph) is enough, without
  // limits.
  bool create_graph = false;
  // Within a step of several micro-batches: keeps a copy of what those before have added up, in the same memory, until
  // this micro-batch has ended. Should it fail, they stay; without the copy they are dropped with it.
  bool recoverable = false;
};

// What of a gradient is in this rank's shard.
struct OwnGradient {
  std::int64_t begin = 0;  // of values, in elements of the flattened parameter
  at::Tensor values;       // fp32, flat; may be empty. Undefined: the parameter is frozen
};

// A scope of Engine::gathered_parameters(). While it lives, the parameters of its units are whole on every rank, in
// memory of their own, of their shape and of the recipe's compute dtype; raw pointers may be taken. Those of other
// units are as without it. One that modifies may write its units in place (copy_, mul_; not torch::load, which puts
// other tensors in their place) on rank 0; its values replace those of every rank when it ends. Scopes may be nested,
// their units may overlap. A checkpoint is not saved inside one that modifies, nor loaded inside any; backward() and
// step() throw inside any.
class [[nodiscard]] ZERO_API GatheredParameters {
 public:
  GatheredParameters(GatheredParameters&&) noexcept;  // local
  GatheredParameters& operator=(GatheredParameters&&) = delete;
  // close(), with errors logged instead of thrown.
  ~GatheredParameters();
  // Ends the scope now. Collective and blocking where it modifies, else local. Throws CommError, IoError; ConfigError
  // when a parameter was replaced within. Nothing when called again.
  void close();

 private:
  friend class Engine;
  GatheredParameters(std::shared_ptr<engine::State> state, std::vector<int> groups, bool modify);
  std::shared_ptr<engine::State> state_;
  std::vector<int> groups_;
  bool modify_;
};

}  // namespace zero
