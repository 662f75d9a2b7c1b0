#include "torchglue/interception.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

#include "base/check.h"

namespace zero::torchglue {
namespace {

// Reserved in core, above autograd and autocast; no kernel of core uses it.
constexpr auto kKey = c10::DispatchKey::DeferredInit;

// key_set_ is protected; a derived type may name it as a pointer to member.
struct KeySetAccess : c10::TensorImpl {
  static c10::DispatchKeySet c10::TensorImpl::*member() { return &KeySetAccess::key_set_; }
};

struct Target {
  UseListener* listener;
  int tag;
};

struct Registry {
  std::shared_mutex mutex;
  std::unordered_map<c10::StorageImpl*, Target> targets;
};
// Never destroyed: operators may run while other statics are destroyed.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

// Views that touch metadata only: they need no data, so a released parameter stays released.
bool is_pure_view(const std::string& name) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::t",       "aten::transpose", "aten::view",      "aten::select",    "aten::slice",     "aten::narrow",
      "aten::detach",  "aten::alias",     "aten::expand",    "aten::as_strided", "aten::unsqueeze", "aten::squeeze",
      "aten::permute", "aten::unbind",    "aten::split",     "aten::chunk",     "aten::numpy_T",   "aten::diagonal",
      "aten::unfold",  "aten::movedim",   "aten::view_as",   "aten::expand_as", "aten::split_with_sizes",
      "aten::tensor_split", "aten::mT",   "aten::_reshape_alias", "aten::swapaxes", "aten::unflatten"};
  return names->count(name) != 0;
}

// In-place by their schema, but they leave the data alone.
bool writes_metadata_only(const std::string& name) {
  return name == "aten::requires_grad_" || name == "aten::retain_grad" || name == "aten::detach_" || name == "aten::rename_" ||
         name == "aten::set_data" || name == "aten::_backward";
}

struct Uses {
  // More parameters than this in one operator (a large TensorList) are handed over in portions.
  static constexpr int kMost = 64;
  UseListener* listener = nullptr;
  std::array<int, kMost> tags;
  int count = 0;
};

// False: the operator is to be left out.
bool collect(const at::Tensor& tensor, bool written, const char* op, bool reads, std::vector<Uses>& all) {
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
  for (auto& uses : all) {
    if (uses.listener != target.listener || uses.count == Uses::kMost) continue;
    uses.tags[uses.count++] = target.tag;
    return true;
  }
  all.push_back({});
  all.back().listener = target.listener;
  all.back().tags[all.back().count++] = target.tag;
  return true;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const char* name = schema.name().c_str();
  const auto& returns = schema.returns();
  const bool may_alias = !returns.empty() && returns[0].alias_info() != nullptr && !returns[0].alias_info()->isWrite();
  const bool reads = !(may_alias && is_pure_view(schema.name()));
  thread_local std::vector<Uses> reused;
  auto all = std::move(reused);
  all.clear();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = values[i];
    const auto* alias = arguments[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite() && !writes_metadata_only(schema.name());
    if (value.isTensor()) {
      if (collect(value.toTensor(), written, name, reads, all)) continue;
      const auto unchanged = value;
      torch::jit::drop(*stack, arguments.size());
      for (std::size_t r = 0; r < returns.size(); ++r) stack->push_back(unchanged);
      return;
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) collect(tensor, written, name, reads, all);
    } else if (value.isList()) {  // Tensor?[] arrives as a list of optionals
      for (const auto& element : value.toListRef())
        if (element.isTensor()) collect(element.toTensor(), written, name, reads, all);
    }
  }
  for (const auto& uses : all) uses.listener->before_use(uses.tags.data(), uses.count, name);
  reused = std::move(all);
  // Without the guard composite operators would enter again for their parts.
  c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
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

void intercept(const at::Tensor& parameter, UseListener* listener, int tag) {
  register_fallback();
  auto* impl = parameter.unsafeGetTensorImpl();
  {
    auto& r = registry();
    std::unique_lock<std::shared_mutex> lock(r.mutex);
    r.targets[parameter.storage().unsafeGetStorageImpl()] = {listener, tag};
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

}  // namespace zero::torchglue
