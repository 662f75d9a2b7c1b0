// Disables inference mode inside the library. Tensors created in a program's c10::InferenceMode could not be modified
// in place later.
#pragma once
#include <c10/core/InferenceMode.h>

#include <optional>

namespace zero::torch_hooks {

// RAII guard: disables inference mode in this thread.
class NormalMode {
 public:
  NormalMode() {
    if (c10::InferenceMode::is_enabled()) guard_.emplace(false);
  }

 private:
  std::optional<c10::InferenceMode> guard_;
};

}  // namespace zero::torch_hooks
