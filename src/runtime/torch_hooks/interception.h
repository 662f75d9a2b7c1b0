// Catching the use of a parameter inside an unmodified module. A spare dispatch key in the
// parameter's key set sends every operator that reads the parameter, or a view of it, through
// one boxed fallback: forward, backward and recomputation alike. Knows tensors and listeners,
// not what they are for.
//
// [Note: one fallback per process] The dispatcher takes one fallback per key. It is registered
// when the first parameter is intercepted; listeners are found by the storage of the argument.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

namespace zero::torch_hooks {

class UseListener {
 public:
  virtual ~UseListener() = default;
  // An operator is about to read the data of the parameters `tags[0..count)` (those of this
  // listener). May make data appear; may throw: the exception reaches whoever called the operator.
  // All of one operator's parameters come in one call, from whatever thread runs it.
  virtual void before_use(const int* tags, int count, const char* op) = 0;
  // The operator has run, or thrown: its thread reads them no more. Once for every before_use() that returned.
  virtual void after_use(const int* tags, int count) noexcept = 0;
  // The operator writes parameter `tag` in place. False: the write is left out, and the operator returns the parameter
  // as it is.
  virtual bool before_write(int tag, const char* op) = 0;
};

// Puts the key on the parameter and registers its storage. The listener must outlive it or be
// taken off with stop_intercepting(). Throws ConfigError when another copy of the library holds
// the dispatch key.
void intercept(const at::Tensor& parameter, UseListener* listener, int tag);
// `storage`: the one the parameter had when it was intercepted.
void stop_intercepting(const at::Tensor& parameter, const c10::Storage& storage);
bool is_intercepted(const at::Tensor& parameter);

}  // namespace zero::torch_hooks
