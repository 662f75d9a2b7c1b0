#include "torch_hooks/interception.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>
#include <zero/read_scope.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

#include "base/check.h"

namespace zero::torch_hooks {
namespace {

// Reserved in PyTorch's core, above autograd and autocast; no kernel uses it.
constexpr auto kKey = c10::DispatchKey::DeferredInit;

// key_set_ is protected; a derived type may access it through a pointer to member.
struct KeySetAccess : c10::TensorImpl {
  static c10::DispatchKeySet c10::TensorImpl::*member() { return &KeySetAccess::key_set_; }
};

struct Target {
  UseListener* listener;
  int tag;
  CallHandler* handler;  // or null
};

struct Registry {
  std::shared_mutex mutex;
  std::unordered_map<c10::StorageImpl*, Target> targets;
};
// Never destroyed: operators may run during the destruction of other statics.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

}  // namespace

bool is_pure_view(const std::string& name) {
  static const auto* names = new std::unordered_set<std::string>{"aten::t",
                                                                 "aten::transpose",
                                                                 "aten::view",
                                                                 "aten::select",
                                                                 "aten::slice",
                                                                 "aten::narrow",
                                                                 "aten::detach",
                                                                 "aten::alias",
                                                                 "aten::expand",
                                                                 "aten::as_strided",
                                                                 "aten::unsqueeze",
                                                                 "aten::squeeze",
                                                                 "aten::permute",
                                                                 "aten::unbind",
                                                                 "aten::split",
                                                                 "aten::chunk",
                                                                 "aten::numpy_T",
                                                                 "aten::diagonal",
                                                                 "aten::unfold",
                                                                 "aten::movedim",
                                                                 "aten::view_as",
                                                                 "aten::expand_as",
                                                                 "aten::split_with_sizes",
                                                                 "aten::mT",
                                                                 "aten::swapaxes",
                                                                 "aten::unflatten",
                                                                 "aten::swapdims",
                                                                 "aten::moveaxis",
                                                                 "aten::hsplit",
                                                                 "aten::vsplit",
                                                                 "aten::dsplit",
                                                                 "aten::mH",
                                                                 "aten::adjoint",
                                                                 "aten::matrix_H",
                                                                 "aten::tensor_split",
                                                                 "aten::_reshape_alias"};
  return names->count(name) != 0;
}

bool reads_metadata_only(const std::string& name) {
  static const auto* names = new std::unordered_set<std::string>{"aten::zeros_like",
                                                                 "aten::ones_like",
                                                                 "aten::empty_like",
                                                                 "aten::full_like",
                                                                 "aten::rand_like",
                                                                 "aten::randn_like",
                                                                 "aten::randint_like",
                                                                 "aten::_efficientzerotensor",
                                                                 "aten::new_empty",
                                                                 "aten::new_zeros",
                                                                 "aten::new_ones",
                                                                 "aten::new_full",
                                                                 "aten::new_empty_strided",
                                                                 "aten::size",
                                                                 "aten::stride",
                                                                 "aten::sym_size",
                                                                 "aten::sym_stride",
                                                                 "aten::sym_numel",
                                                                 "aten::numel",
                                                                 "aten::dim",
                                                                 "aten::storage_offset",
                                                                 "aten::sym_storage_offset",
                                                                 "aten::is_same_size",
                                                                 "aten::is_floating_point",
                                                                 "aten::is_complex",
                                                                 "aten::is_signed",
                                                                 "aten::is_conj",
                                                                 "aten::is_neg",
                                                                 "aten::is_inference",
                                                                 "aten::is_leaf",
                                                                 "aten::output_nr",
                                                                 "aten::_version",
                                                                 "aten::retains_grad",
                                                                 "aten::result_type",
                                                                 "aten::can_cast",
                                                                 "aten::_has_compatible_shallow_copy_type",
                                                                 "aten::_has_same_storage_numel",
                                                                 "aten::_is_zerotensor",
                                                                 "aten::is_set_to",
                                                                 "aten::_debug_has_internal_overlap",
                                                                 "aten::sparse_dim",
                                                                 "aten::dense_dim",
                                                                 "aten::is_distributed",
                                                                 "aten::is_contiguous",
                                                                 "aten::sym_is_contiguous",
                                                                 "aten::is_non_overlapping_and_dense"};
  return names->count(name) != 0;
}

bool writes_metadata_only(const std::string& name) {
  return name == "aten::requires_grad_" || name == "aten::retain_grad" || name == "aten::detach_" ||
         name == "aten::rename_" || name == "aten::set_data" || name == "aten::_backward";
}

namespace {

// All uses of one listener's parameters by one operator, because they must stay unsharded together.
struct Uses {
  UseListener* listener = nullptr;
  c10::SmallVector<int, 8> tags;
};

// An operator's uses of parameters that have a handler.
struct Handled {
  CallHandler* handler = nullptr;
  c10::SmallVector<CallHandler::Use, 2> uses;
};

// False: the operator must be skipped.
bool collect(const at::Tensor& tensor, bool written, const char* op, bool reads, std::vector<Uses>& all,
             Handled& handled, std::size_t argument = 0, bool in_list = false) {
  if (!tensor.defined() || !tensor.key_set().has(kKey) || !tensor.has_storage()) return true;
  Target target;
  {
    auto& r = registry();
    std::shared_lock<std::shared_mutex> lock(r.mutex);
    const auto it = r.targets.find(tensor.storage().unsafeGetStorageImpl());
    if (it == r.targets.end()) return true;
    target = it->second;
  }
  if (written && !target.listener->before_write(target.tag, op)) return false;
  if (!reads) return true;
  if (target.handler != nullptr) {
    if (handled.handler != nullptr && handled.handler != target.handler)
      throw ConfigError(std::string("[Engine::forward] ") + op +
                        " reads parameters that two Engines have divided over tensor-parallel ranks. Hint: an operator "
                        "may read those of one Engine.");
    handled.handler = target.handler;
    handled.uses.push_back({target.tag, argument, in_list});
  }
  for (auto& uses : all) {
    if (uses.listener != target.listener) continue;
    uses.tags.push_back(target.tag);
    return true;
  }
  all.push_back({});
  all.back().listener = target.listener;
  all.back().tags.push_back(target.tag);
  return true;
}

// Calls before_use() and, in any case, after_use().
class Running {
 public:
  explicit Running(std::vector<Uses>& all) : all_(all) {}
  void begin(const char* op) {
    for (const auto& uses : all_) {
      uses.listener->before_use(uses.tags.data(), static_cast<int>(uses.tags.size()), op);
      ++begun_;
    }
  }
  ~Running() {
    for (std::size_t i = 0; i < begun_; ++i)
      all_[i].listener->after_use(all_[i].tags.data(), static_cast<int>(all_[i].tags.size()));
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  std::vector<Uses>& all_;
  std::size_t begun_ = 0;
};

// libtorch's errors about dtypes name no parameter. `optional`: arguments that the operator has taken from the stack.
void explain_dtypes(c10::Error& error, const char* op, const torch::jit::Stack& stack, std::size_t num_arguments,
                    at::ArrayRef<at::Tensor> optional, const std::vector<Uses>& all) {
  if (error.msg().find("type") == std::string::npos || stack.size() < num_arguments) return;
  std::vector<at::Tensor> tensors;
  for (const auto& value : torch::jit::last(stack, num_arguments))
    if (value.isTensor()) tensors.push_back(value.toTensor());
  tensors.insert(tensors.end(), optional.begin(), optional.end());
  for (const auto& tensor : tensors) {
    if (!tensor.defined() || !tensor.is_floating_point()) continue;
    for (const auto& uses : all)
      for (const int tag : uses.tags)
        if (auto text = uses.listener->on_refused_dtype(tag, op, tensor); !text.empty())
          return error.add_context(std::move(text));
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const char* name = schema.name().c_str();
  const auto& returns = schema.returns();
  const bool may_alias = !returns.empty() && returns[0].alias_info() != nullptr && !returns[0].alias_info()->isWrite();
  const bool reads = !(may_alias ? is_pure_view(schema.name()) : reads_metadata_only(schema.name()));
  thread_local std::vector<Uses> reused;
  auto all = std::move(reused);
  all.clear();
  Handled handled;
  c10::SmallVector<at::Tensor, 4> optional;
  const auto values = torch::jit::last(*stack, arguments.size());
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = values[i];
    const auto* alias = arguments[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite() && !writes_metadata_only(schema.name());
    if (value.isTensor()) {
      if (arguments[i].type()->kind() == c10::TypeKind::OptionalType) optional.push_back(value.toTensor());
      if (collect(value.toTensor(), written, name, reads, all, handled, i)) continue;
      const auto unchanged = value;
      torch::jit::drop(*stack, arguments.size());
      for (std::size_t r = 0; r < returns.size(); ++r) stack->push_back(unchanged);
      return;
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector())
        collect(tensor, written, name, reads, all, handled, i, /*in_list=*/true);
    } else if (value.isList()) {  // Tensor?[] arrives as a list of optionals
      for (const auto& element : value.toListRef())
        if (element.isTensor()) collect(element.toTensor(), written, name, reads, all, handled, i, /*in_list=*/true);
    }
  }
  {
    Running running(all);
    running.begin(name);
    // Without the guard, composite operators would be intercepted again for their parts.
    c10::impl::ExcludeDispatchKeyGuard guard(kKey);
    OperatorCall call(op, keys, *stack);
    try {
      if (handled.handler == nullptr)
        call.run();
      else
        handled.handler->handle(call, handled.uses.data(), handled.uses.size());
    } catch (c10::Error& error) {
      explain_dtypes(error, name, *stack, arguments.size(), optional, all);
      throw;
    }
  }
  reused = std::move(all);
}

void register_fallback() {
  static std::once_flag once;
  static std::string failure;
  std::call_once(once, [] {
    try {
      static auto* library = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
      library->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    } catch (const std::exception& e) {
      failure = e.what();
    }
  });
  if (!failure.empty())
    throw ConfigError("[Engine] the dispatch key libzero needs is taken: " + failure.substr(0, failure.find('\n')) +
                      ". Hint: link one copy of libzero into the process.");
}

}  // namespace

const std::string& OperatorCall::name() const { return op_.schema().name(); }

c10::IValue& OperatorCall::argument(std::size_t i) {
  return torch::jit::peek(stack_, i, op_.schema().arguments().size());
}

void OperatorCall::run() {
  op_.redispatchBoxed(keys_ & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), &stack_);
  ran_ = true;
}

at::Tensor OperatorCall::take() { return torch::jit::pop(stack_).toTensor(); }

void OperatorCall::finish(at::Tensor result) {
  if (!std::exchange(ran_, true)) torch::jit::drop(stack_, op_.schema().arguments().size());
  stack_.emplace_back(std::move(result));
}

void intercept(const at::Tensor& parameter, UseListener* listener, int tag, CallHandler* handler) {
  register_fallback();
  auto* impl = parameter.unsafeGetTensorImpl();
  {
    auto& r = registry();
    std::unique_lock<std::shared_mutex> lock(r.mutex);
    r.targets[parameter.storage().unsafeGetStorageImpl()] = {listener, tag, handler};
  }
  impl->*KeySetAccess::member() = impl->key_set().add(kKey);
}

void stop_intercepting(const at::Tensor& parameter, const c10::Storage& storage) {
  auto* impl = parameter.unsafeGetTensorImpl();
  impl->*KeySetAccess::member() = impl->key_set().remove(kKey);
  auto& r = registry();
  std::unique_lock<std::shared_mutex> lock(r.mutex);
  r.targets.erase(storage.unsafeGetStorageImpl());
}

bool is_intercepted(const at::Tensor& parameter) {
  if (!parameter.key_set().has(kKey)) return false;
  auto& r = registry();
  std::shared_lock<std::shared_mutex> lock(r.mutex);
  return r.targets.count(parameter.storage().unsafeGetStorageImpl()) != 0;
}

}  // namespace zero::torch_hooks

namespace zero {

struct ReadScope::State {
  std::vector<torch_hooks::Uses> uses;
  torch_hooks::Running running{uses};
};

ReadScope::ReadScope(at::TensorList tensors, const char* kernel, bool training) {
  std::vector<torch_hooks::Uses> uses;
  torch_hooks::Handled handled;
  for (const auto& tensor : tensors)
    torch_hooks::collect(tensor, /*written=*/false, kernel, /*reads=*/true, uses, handled);
  for (const auto& use : handled.uses) handled.handler->before_kernel(use.tag, kernel);
  if (uses.empty()) return;
  state_ = std::make_unique<State>();
  state_->uses = std::move(uses);
  const at::AutoGradMode mode(training);  // listeners take a use without grad mode for an evaluation
  state_->running.begin(kernel);
}

ReadScope::~ReadScope() = default;
ReadScope::ReadScope(ReadScope&&) noexcept = default;

void ReadScope::check_write(at::TensorList tensors, const char* kernel) {
  std::vector<torch_hooks::Uses> uses;
  torch_hooks::Handled handled;
  for (const auto& tensor : tensors)
    if (!torch_hooks::collect(tensor, /*written=*/true, kernel, /*reads=*/false, uses, handled))
      throw ConfigError(std::string("[ReadScope] ") + kernel + " writes a parameter, and its write cannot be skipped");
}

}  // namespace zero
