// Intercepts uses of a parameter inside an unmodified module. A spare dispatch key in the parameter's key set routes
// every operator that reads the parameter, or a view of it, through one boxed fallback, in forward, backward and
// recomputation. Knows tensors and listeners only.
//
// [Note: one fallback per process] The dispatcher takes one fallback per key. It is registered when the first parameter
// is intercepted; listeners are found by the storage of the argument.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

namespace zero::torch_hooks {

class UseListener {
 public:
  virtual ~UseListener() = default;
  // An operator is about to read the parameters `tags[0..count)` of this listener. May supply their data. Exceptions
  // propagate to the operator's caller. Called once per operator for all of its parameters, in the thread that runs it.
  virtual void before_use(const int* tags, int count, const char* op) = 0;
  // The operator has finished or thrown. Called once for every before_use() that returned.
  virtual void after_use(const int* tags, int count) noexcept = 0;
  // The operator writes parameter `tag` in place. false: skips the write; the operator returns the parameter unchanged.
  virtual bool before_write(int tag, const char* op) = 0;
};

// Adds the key to the parameter and registers its storage. The listener must outlive the parameter or be removed with
// stop_intercepting(). Throws ConfigError if another copy of the library uses the dispatch key.
void intercept(const at::Tensor& parameter, UseListener* listener, int tag);
// `storage`: the parameter's storage when it was intercepted.
void stop_intercepting(const at::Tensor& parameter, const c10::Storage& storage);
bool is_intercepted(const at::Tensor& parameter);

}  // namespace zero::torch_hooks
