// What the library makes and writes is for later, too: inside a program's c10::InferenceMode its tensors would be such
// that nothing may write them in place afterwards.
#pragma once
#include <c10/core/InferenceMode.h>

#include <optional>

namespace zero::torch_hooks {

// While it lives, this thread is in no inference mode.
class NormalMode {
 public:
  NormalMode() {
    if (c10::InferenceMode::is_enabled()) guard_.emplace(false);
  }

 private:
  std::optional<c10::InferenceMode> guard_;
};

}  // namespace zero::torch_hooks
