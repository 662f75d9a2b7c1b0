// Intercepts uses of a parameter inside an unmodified module. A spare dispatch key in the parameter's key set routes
// every operator that reads the parameter, or a view of it, through one boxed fallback, in forward, backward and
// recomputation. Knows tensors and listeners only.
//
// [Note: one fallback per process] The dispatcher takes one fallback per key. It is registered when the first parameter
// is intercepted; listeners are found by the storage of the argument.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <string>

namespace c10 {
class OperatorHandle;
}

namespace zero::torch_hooks {

// Operators by name. Those that may copy, for example reshape, are in none.
// Views that only touch metadata: they need no data, so a sharded parameter stays sharded.
bool is_pure_view(const std::string& name);
// The results depend on sizes, strides and types only. A test compares the names with the dispatcher's.
bool reads_metadata_only(const std::string& name);
// In-place by their schema, but they do not write data.
bool writes_metadata_only(const std::string& name);

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
  // The operator refused a dtype; it takes the parameter `tag` and `other`, a tensor. Returns what is added
  // to its error.
  virtual std::string on_refused_dtype(int /*tag*/, const char* /*op*/, const at::Tensor& /*other*/) { return {}; }
};

// The call of an operator that reads parameters, before it runs.
class OperatorCall {
 public:
  OperatorCall(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack)
      : op_(op), keys_(keys), stack_(stack) {}
  const std::string& name() const;  // "aten::addmm"
  c10::IValue& argument(std::size_t i);
  // Runs the operator with its present arguments. Its results replace them.
  void run();
  // Takes the tensor that run() returned.
  at::Tensor take();
  // Ends the call with `result`: instead of run(), or after take().
  void finish(at::Tensor result);

 private:
  const c10::OperatorHandle& op_;
  const c10::DispatchKeySet keys_;
  torch::jit::Stack& stack_;
  bool ran_ = false;
};

// Runs operators on behalf of the dispatcher, for parameters that are not what the module takes them for.
class CallHandler {
 public:
  virtual ~CallHandler() = default;
  // A parameter of this handler, or a view of one, among an operator's arguments.
  struct Use {
    int tag;
    std::size_t argument;  // its index
    bool in_list;          // the argument is a list that contains it
  };
  // Must call run() or finish(). Called after UseListener::before_use(), for operators that read data.
  virtual void handle(OperatorCall& call, const Use* uses, std::size_t count) = 0;
  // A kernel that the dispatcher does not know reads the parameter (zero/read_scope.h). May throw.
  virtual void before_kernel(int tag, const char* kernel) = 0;
};

// Adds the key to the parameter and registers its storage. Listener and handler must outlive the parameter or be
// removed with stop_intercepting(). Throws ConfigError if another copy of the library uses the dispatch key.
void intercept(const at::Tensor& parameter, UseListener* listener, int tag, CallHandler* handler = nullptr);
// `storage`: the parameter's storage when it was intercepted.
void stop_intercepting(const at::Tensor& parameter, const c10::Storage& storage);
bool is_intercepted(const at::Tensor& parameter);

}  // namespace zero::torch_hooks
