// Preconditions of Engine calls: whether a call is allowed now, and whether the program changed the model. Errors are
// thrown before anything is sent or changed.
#pragma once
#include <zero/engine.h>

#include "base/plain_name.h"
#include "engine/parts.h"

namespace zero::engine {

class Checks {
 public:
  explicit Checks(const Parts& parts) : p_(parts) {}

  // Throws ConfigError, or CommError after a failure that ended the run. `call`: "step", for messages.
  // loading: a load may follow one, or an import, that failed halfway.
  void require_usable(const char* call, bool loading = false) const;
  // Throws within a micro-batch, too, whose last backward() kept its graph.
  void require_between_passes(const char* call) const;
  // Throws within an accumulation, too.
  void require_boundary(const char* call, bool loading = false) const;
  // Throws inside a scope that modifies; reading_too: inside any scope.
  void require_no_scope(const char* call, bool reading_too) const;
  // Throws if an evaluation would read parameters that lack an update.
  void require_current(const char* op) const;
  void before_backward(const at::Tensor& loss, const BackwardOptions& options) const;
  // The same without a loss.
  void before_pass(const BackwardOptions& options) const;
  void before_step() const;
  // Checks the model's parameters, hooks and gradients.
  void parameters(const char* call) const;
  // Throws if the program replaced the tensor of a group's parameter that tensor parallelism divides.
  void cut_parameters(int group) const;

 private:
  void require_closed(const char* call) const;
  void hooks(const std::string& where) const;
  [[noreturn]] void fail_replaced(const char* call, const ModelParameter& parameter) const;
  void no_new_parameters(const std::string& where) const;

  const Parts& p_;
};

// Whether checkpoints support the dtype.
bool can_be_saved(at::ScalarType type);

// The longest name of a parameter or buffer. Files add what is said of it.
inline constexpr std::size_t kMostModelNameBytes = 4000;
// Of a name that files cannot hold: itself, for a terminal, and why.
std::string name_fault(const std::string& name);

}  // namespace zero::engine
