// Whether a call may be made now, and whether the model is as the Engine left it: errors in words, before anything is
// sent or changed.
#pragma once
#include <zero/engine.h>

#include "engine/parts.h"

namespace zero::engine {

class Checks {
 public:
  explicit Checks(Parts& parts) : p_(parts) {}

  // ConfigError, or CommError after an error that ended the run. `call`: "step", for messages.
  void require_usable(const char* call) const;
  // Also within an accumulation.
  void require_boundary(const char* call) const;
  // Inside a scope that modifies; reading_too: inside any.
  void require_no_scope(const char* call, bool reading_too) const;
  // Parameters read by an evaluation have every update.
  void require_current(const char* op) const;
  void before_backward(const at::Tensor& loss, const BackwardOptions& options) const;
  void before_step() const;
  // The model's parameters, hooks and gradients.
  void parameters(const char* call) const;

 private:
  void hooks(const std::string& where) const;
  void no_new_parameters(const std::string& where) const;

  Parts& p_;
};

// Whether checkpoints can hold it.
bool can_be_saved(at::ScalarType type);

}  // namespace zero::engine
