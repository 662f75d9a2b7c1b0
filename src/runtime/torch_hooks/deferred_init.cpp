#include "torch_hooks/deferred_init.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "torch_hooks/interception.h"
#include "torch_hooks/storage_access.h"

namespace zero::torch_hooks {
namespace {
constexpr auto kMode = c10::DispatchKey::TESTING_ONLY_GenericMode;

struct Recorded {
  c10::OperatorHandle op;
  torch::jit::Stack arguments;
};

// Calls visit(tensor) for a tensor, or for each of a list, which may hold tensors or optional ones.
template <class Visit>
void for_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) for_tensors(element, visit);
  }
}

// Whether it writes every element of its tensor's storage and depends on none.
bool replaces_all(const Recorded& entry) {
  static const std::set<std::string> kOperators{
      "aten::cauchy_",     "aten::copy_",   "aten::exponential_", "aten::fill_",    "aten::geometric_",
      "aten::log_normal_", "aten::normal_", "aten::random_",      "aten::uniform_", "aten::zero_"};
  const auto target = entry.arguments[0].toTensor();
  return kOperators.count(entry.op.schema().name()) != 0 && target.is_non_overlapping_and_dense() &&
         target.nbytes() == target.storage().nbytes();
}

at::Generator generator_from(const at::Tensor& state) {
  auto generator = at::detail::createCPUGenerator();
  generator.set_state(state);
  return generator;
}

at::Tensor default_state() {
  auto generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_default_state(const at::Tensor& state) {
  auto generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

std::mutex registry_mutex;

// The memory of a tensor that has its values before an Engine takes it, because the model was read while it was built,
// and where it goes.
struct Destined;
std::unordered_map<c10::StorageImpl*, const Destined*>& destined_storages() {
  static auto* instance = new std::unordered_map<c10::StorageImpl*, const Destined*>;
  return *instance;
}
struct Destined {
  Destined(c10::StorageImpl* of, at::Device to) : storage(of), device(to) {
    const std::lock_guard<std::mutex> lock(registry_mutex);
    destined_storages()[storage] = this;
  }
  ~Destined() {
    const std::lock_guard<std::mutex> lock(registry_mutex);
    const auto it = destined_storages().find(storage);
    if (it != destined_storages().end() && it->second == this) destined_storages().erase(it);
  }
  c10::StorageImpl* const storage;
  const at::Device device;
  c10::DataPtr data;
};

}  // namespace

// The initializers of one recording, in program order, and the random number generator they use.
class DeferredTape {
 public:
  explicit DeferredTape(at::Device device) : device_(device), start_(default_state()) {}
  at::Device device() const { return device_; }

  void record(const c10::OperatorHandle& op, torch::jit::Stack arguments) {
    // Initializers without a generator argument use the process's default one. Ranks may be threads of one process, so
    // a replay uses its own generator, passed as an argument if the operator takes one.
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      auto& value = arguments[i];
      if (!value.isTensor() || !value.toTensor().defined()) continue;
      // The program may give the tensor other memory or another shape before the replay. It cannot be told here when it
      // writes to memory that is not torch's.
      auto tensor = value.toTensor().detach();
      if (i > 0 && tensor.has_storage() && tensor.storage().allocator() == nullptr) tensor = tensor.clone();
      if (i > 0 && tensor.has_storage()) sources_.insert(tensor.storage().unsafeGetStorageImpl());
      value = std::move(tensor);
    }
    tape_.push_back({op, std::move(arguments)});
  }
  // Whether a recorded initializer reads the tensor, so that it must run before a write to it.
  bool reads(const at::Tensor& tensor) const {
    return tensor.has_storage() && sources_.count(tensor.storage().unsafeGetStorageImpl()) != 0;
  }

  // Runs everything recorded so far. after_write(storage, left): `left` recorded initializers of that storage remain.
  // Values that a later initializer replaces are drawn, but not kept.
  void replay(const std::function<void(c10::StorageImpl*, std::size_t)>& after_write) {
    at::NoGradGuard no_grad;
    auto tape = std::move(tape_);
    tape_.clear();
    sources_.clear();
    std::unordered_map<c10::StorageImpl*, std::size_t> left;
    std::unordered_map<c10::StorageImpl*, bool> replaced;
    std::vector<char> is_replaced(tape.size());
    for (std::size_t i = tape.size(); i-- > 0;) {
      auto* storage = storage_of(tape[i].arguments[0]);
      ++left[storage];
      is_replaced[i] = std::exchange(replaced[storage], replaces_all(tape[i])) ? 1 : 0;
    }
    auto generator = generator_from(start_);
    for (std::size_t at = 0; at < tape.size(); ++at) {
      auto& entry = tape[at];
      const auto target = entry.arguments[0].toTensor();
      auto* storage = storage_of(entry.arguments[0]);
      if (has_no_data(target)) fill(storage, device_);
      const auto& parameters = entry.op.schema().arguments();
      for (std::size_t i = 0; i < parameters.size(); ++i)
        if (parameters[i].name() == "generator" && entry.arguments[i].isNone()) entry.arguments[i] = generator;
      entry.op.callBoxed(entry.arguments);
      entry.arguments.clear();
      if (is_replaced[at] != 0) release_storage(target.storage(), "[zero::build] initial values are incomplete");
      after_write(storage, --left[storage]);
    }
    start_ = generator.get_state();
  }
  // At the end of the recording. Where all of it has run already, no replay is left to set the generator.
  void finish() {
    if (tape_.empty() && !at::equal(start_, first_)) set_default_state(start_);
  }
  // The state of the generator after the replay.
  const at::Tensor& state() const { return start_; }
  void set_state(at::Tensor state) { start_ = std::move(state); }
  bool moved() const { return moved_; }
  void move_generator(at::Tensor state) {
    moved_ = moved_ || !at::equal(state, start_);
    start_ = std::move(state);
  }

  static c10::StorageImpl* storage_of(const c10::IValue& value) {
    return value.toTensor().storage().unsafeGetStorageImpl();
  }
  static void fill(c10::StorageImpl* storage, at::Device device) {
    give(storage, device, c10::GetCPUAllocator()->allocate(storage->nbytes()));
  }
  static void give(c10::StorageImpl* storage, at::Device device, c10::DataPtr data) {
    if (device.is_cpu()) return fill_storage(*storage, std::move(data));
    auto* destined = new Destined(storage, device);
    destined->data = std::move(data);
    fill_storage(*storage, c10::DataPtr(
                               destined->data.get(), destined,
                               [](void* context) { delete static_cast<Destined*>(context); }, c10::Device(c10::kCPU)));
  }

 private:
  const at::Device device_;
  std::vector<Recorded> tape_;
  std::set<c10::StorageImpl*> sources_;
  at::Tensor start_;
  const at::Tensor first_ = start_.clone();  // when the recording began
  bool moved_ = false;
};

namespace {

// The tape of each storage without data.
std::unordered_map<c10::StorageImpl*, std::weak_ptr<DeferredTape>>& living_tapes() {
  static auto* instance = new std::unordered_map<c10::StorageImpl*, std::weak_ptr<DeferredTape>>;
  return *instance;
}
thread_local std::shared_ptr<DeferredTape> recording;

// The context of a storage whose values others have.
struct Elsewhere;
std::unordered_map<c10::StorageImpl*, const Elsewhere*>& living_elsewhere() {
  static auto* instance = new std::unordered_map<c10::StorageImpl*, const Elsewhere*>;
  return *instance;
}
struct Elsewhere {
  c10::StorageImpl* const storage;
  const at::Device device;
  const std::int64_t place;
  const std::function<void(const at::Tensor&)> fill;
  ~Elsewhere() {
    const std::lock_guard<std::mutex> lock(registry_mutex);
    living_elsewhere().erase(storage);
  }
};

// Whether the tensor gets its values from the tape. What another recording, or an Engine, has without data does not.
bool waits_for(const DeferredTape& tape, const at::Tensor& tensor) {
  if (!has_no_data(tensor)) return false;
  std::lock_guard<std::mutex> lock(registry_mutex);
  const auto it = living_tapes().find(tensor.storage().unsafeGetStorageImpl());
  return it != living_tapes().end() && it->second.lock().get() == &tape;
}

// The context of a storage without data: keeps the tape alive while a tensor needs it, and removes the storage from the
// registry when it is filled or destroyed.
struct Waiting {
  std::shared_ptr<DeferredTape> tape;
  c10::StorageImpl* storage;
  ~Waiting() {
    std::lock_guard<std::mutex> lock(registry_mutex);
    living_tapes().erase(storage);
  }
};

constexpr const char* kUnread =
    "[zero::build] cannot read a parameter that has no values yet. Hint: construct an Engine from the module first; "
    "the function that builds it reads a clone(), as data_ptr() takes memory that is not there";

at::Tensor deferred_tensor(const std::shared_ptr<DeferredTape>& tape, at::IntArrayRef sizes, at::ScalarType dtype) {
  auto tensor = without_data(sizes, dtype, c10::Device(c10::kCPU));
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  // The null pointer's context shares ownership of the tape, so that the tape lives as long as the tensor.
  storage->set_data_ptr_noswap(c10::DataPtr(
      nullptr, new Waiting{tape, storage}, [](void* context) { delete static_cast<Waiting*>(context); },
      c10::Device(c10::kCPU)));
  // What takes the memory without an operator would read at address 0, or its own memory.
  if (storage->nbytes() > 0) guard_storage(*storage, kUnread);
  std::lock_guard<std::mutex> lock(registry_mutex);
  living_tapes()[storage] = tape;
  return tensor;
}

// An operator's arguments by the names of its schema.
class Arguments {
 public:
  Arguments(const c10::FunctionSchema& schema, const torch::jit::Stack& stack)
      : schema_(schema), values_(torch::jit::last(stack, schema.arguments().size())) {}
  std::size_t size() const { return values_.size(); }
  const c10::IValue& operator[](std::size_t i) const { return values_[i]; }
  // null: there is none, or it is None.
  const c10::IValue* find(const char* name) const {
    const auto at = schema_.argumentIndexWithName(name);
    return !at || values_[static_cast<std::size_t>(*at)].isNone() ? nullptr : &values_[static_cast<std::size_t>(*at)];
  }
  bool writes(std::size_t i) const {
    const auto* const alias = schema_.arguments()[i].alias_info();
    return alias != nullptr && alias->isWrite();
  }

 private:
  const c10::FunctionSchema& schema_;
  const c10::ArrayRef<c10::IValue> values_;
};

// Whether an operator that may copy returns its tensor, or a view of it: a layer that is made contiguous or converted
// to what it is already keeps its place on the tape.
bool copies_nothing(const std::string& name, const Arguments& arguments) {
  const bool converts = name == "aten::to";
  if (!converts && name != "aten::contiguous" && name != "aten::reshape" && name != "aten::flatten" &&
      name != "aten::ravel")
    return false;
  const auto self = arguments[0].toTensor();
  auto format = at::MemoryFormat::Contiguous;
  if (const auto* const wanted = arguments.find("memory_format"))
    format = wanted->toMemoryFormat();
  else if (converts)
    format = at::MemoryFormat::Preserve;
  if (format != at::MemoryFormat::Preserve && !self.is_contiguous(format)) return false;
  if (!converts) return true;
  if (const auto* const copy = arguments.find("copy"); copy != nullptr && copy->toBool()) return false;
  if (const auto* const other = arguments.find("other"))
    return other->toTensor().scalar_type() == self.scalar_type() && other->toTensor().device().is_cpu();
  const auto *const dtype = arguments.find("dtype"), *const device = arguments.find("device");
  const auto* const layout = arguments.find("layout");
  return (dtype == nullptr || dtype->toScalarType() == self.scalar_type()) &&
         (device == nullptr || device->toDevice().is_cpu()) &&
         (layout == nullptr || layout->toLayout() == at::kStrided);
}

bool needs_no_data(const std::string& name, const Arguments& arguments) {
  return is_pure_view(name) || reads_metadata_only(name) || writes_metadata_only(name) ||
         copies_nothing(name, arguments);
}

void mode(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(kMode);
  const auto tape = recording;
  // Python's torch.tensor() and its like write to the memory of an empty tensor themselves. They exclude this key,
  // which torch has for modes as this one.
  const bool written_directly = c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::DeferredInit);
  if (!tape || written_directly) return op.callBoxed(*stack);
  const auto& schema = op.schema();
  const std::size_t count = schema.arguments().size();
  const Arguments arguments(schema, *stack);
  if (schema.name() == "aten::empty" && schema.overload_name() == "memory_format") {
    const auto* const device = arguments.find("device");
    const auto* const given = arguments.find("dtype");
    const auto dtype = given == nullptr ? at::get_default_dtype_as_scalartype() : given->toScalarType();
    // Parameters are numbers with gradients. torch::tensor() writes to the memory itself, below autograd.
    const bool may_be_parameter = (at::isFloatingType(dtype) || at::isComplexType(dtype)) &&
                                  !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradCPU);
    if (may_be_parameter && (device == nullptr || device->toDevice().is_cpu())) {
      auto tensor = deferred_tensor(tape, arguments[0].toIntVector(), dtype);
      torch::jit::drop(*stack, count);
      stack->emplace_back(std::move(tensor));
      return;
    }
  }
  bool lacking = false, others_lack = false, overwrites = false, lists = false;
  for (std::size_t i = 0; i < count; ++i)
    for_tensors(arguments[i], [&](const at::Tensor& tensor) {
      const bool lacks = waits_for(*tape, tensor);
      lacking |= lacks;
      others_lack |= lacks && i > 0;
      overwrites |= arguments.writes(i) && tape->reads(tensor);
      lists |= !arguments[i].isTensor();
    });
  const bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  if (lacking && !draws && needs_no_data(schema.name(), arguments)) return op.callBoxed(*stack);
  // Another shape of the tensor itself, or numbers of a generator that the program uses elsewhere, cannot wait.
  const bool can_wait = lacking && !others_lack && !lists && !overwrites && arguments.writes(0) &&
                        schema.returns().size() == 1 && !op.hasTag(at::Tag::inplace_view) &&
                        arguments.find("generator") == nullptr;
  if (can_wait) {
    auto self = arguments[0].toTensor();
    tape->record(op, torch::jit::Stack(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end()));
    torch::jit::drop(*stack, count);
    stack->emplace_back(std::move(self));
    return;
  }
  // [Note: catching up] An operator that reads, or that draws random numbers outside an in-place initializer, requires
  // a replay of everything before it: only program order gives the same random numbers.
  if (lacking || draws || overwrites) {
    tape->replay([](c10::StorageImpl*, std::size_t) {});
    for (std::size_t i = 0; i < count; ++i)
      for_tensors(arguments[i], [&](const at::Tensor& tensor) {
        if (waits_for(*tape, tensor)) DeferredTape::fill(tensor.storage().unsafeGetStorageImpl(), tape->device());
      });
  }
  if (!draws) return op.callBoxed(*stack);
  set_default_state(tape->state());
  op.callBoxed(*stack);
  tape->set_state(default_state());
}

void register_mode() {
  static std::once_flag once;
  std::call_once(once, [] {
    static auto* library = new torch::Library(torch::Library::IMPL, "_", kMode, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&mode>());
  });
}

}  // namespace

DeferredRecording::DeferredRecording(at::Device device) {
  if (!device.is_cpu() && !device.is_cuda())
    throw ConfigError(base::join("[build] got the device ", device.str(), ", expected cpu or cuda"));
  register_mode();
  ZERO_CHECK(!recording, "zero::build inside zero::build");
  recording = tape_ = std::make_shared<DeferredTape>(device);
  c10::impl::tls_set_dispatch_key_included(kMode, true);
}

DeferredRecording::~DeferredRecording() {
  c10::impl::tls_set_dispatch_key_included(kMode, false);
  recording.reset();
  tape_->finish();
}

void lend_generator() {
  if (!recording) return;
  const c10::impl::ExcludeDispatchKeyGuard guard(kMode);
  recording->replay([](c10::StorageImpl*, std::size_t) {});
  set_default_state(recording->state());
}

void take_generator() {
  if (!recording) return;
  const c10::impl::ExcludeDispatchKeyGuard guard(kMode);
  recording->set_state(default_state());
}

bool is_deferred(const at::Tensor& tensor) {
  if (!has_no_data(tensor)) return false;
  std::lock_guard<std::mutex> lock(registry_mutex);
  auto* const storage = tensor.storage().unsafeGetStorageImpl();
  return living_tapes().contains(storage) || living_elsewhere().contains(storage);
}

at::Tensor deferred_values(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device, std::int64_t place,
                           std::function<void(const at::Tensor&)> fill) {
  auto tensor = without_data(sizes, dtype, c10::Device(c10::kCPU));
  auto* const storage = tensor.storage().unsafeGetStorageImpl();
  auto* const elsewhere = new Elsewhere{storage, device, place, std::move(fill)};
  storage->set_data_ptr_noswap(c10::DataPtr(
      nullptr, elsewhere, [](void* context) { delete static_cast<Elsewhere*>(context); }, c10::Device(c10::kCPU)));
  if (storage->nbytes() > 0)
    guard_storage(*storage, "[Engine] cannot read a parameter that the ranks hold in parts, before an Engine has it");
  const std::lock_guard<std::mutex> lock(registry_mutex);
  living_elsewhere()[storage] = elsewhere;
  return tensor;
}

at::Device deferred_device(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return tensor.device();
  auto* const storage = tensor.storage().unsafeGetStorageImpl();
  std::lock_guard<std::mutex> lock(registry_mutex);
  if (const auto it = destined_storages().find(storage); it != destined_storages().end()) return it->second->device;
  if (const auto it = living_elsewhere().find(storage); it != living_elsewhere().end()) return it->second->device;
  const auto it = living_tapes().find(storage);
  const auto tape = it == living_tapes().end() ? nullptr : it->second.lock();
  return tape ? tape->device() : tensor.device();
}

namespace {

// Which tensors have memory in a storage: several may be parts of one.
using Index = std::unordered_map<c10::StorageImpl*, std::vector<std::size_t>>;

// The tapes of the tensors, in the order of the tensors.
std::vector<std::shared_ptr<DeferredTape>> tapes_of(const std::vector<at::Tensor>& tensors, Index* index = nullptr) {
  std::vector<std::shared_ptr<DeferredTape>> tapes;
  std::lock_guard<std::mutex> lock(registry_mutex);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    auto* storage = tensors[i].storage().unsafeGetStorageImpl();
    const auto it = living_tapes().find(storage);
    if (it == living_tapes().end()) continue;
    if (index) (*index)[storage].push_back(i);
    auto tape = it->second.lock();
    if (tape && std::find(tapes.begin(), tapes.end(), tape) == tapes.end()) tapes.push_back(tape);
  }
  return tapes;
}

// The tensors whose values others have, by place, each storage once.
std::map<std::int64_t, std::size_t> elsewhere_of(const std::vector<at::Tensor>& tensors, Index& index) {
  std::map<std::int64_t, std::size_t> places;
  const std::lock_guard<std::mutex> lock(registry_mutex);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    auto* const storage = tensors[i].storage().unsafeGetStorageImpl();
    const auto it = living_elsewhere().find(storage);
    if (it == living_elsewhere().end()) continue;
    index[storage].push_back(i);
    places.emplace(it->second->place, i);
  }
  return places;
}

void fill_elsewhere(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  auto* const storage = tensor.storage().unsafeGetStorageImpl();
  at::Device device = c10::kCPU;
  std::function<void(const at::Tensor&)> fill;
  {
    const std::lock_guard<std::mutex> lock(registry_mutex);
    const auto* const found = living_elsewhere().at(storage);
    device = found->device;
    fill = found->fill;
  }
  const auto values = at::empty(tensor.sizes(), tensor.options().device(c10::kCPU));
  fill(values);
  auto data = values.storage().unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
  DeferredTape::give(storage, device, std::move(data));
}

}  // namespace

std::string deferred_generators(const std::vector<at::Tensor>& tensors) {
  std::string states;
  for (const auto& tape : tapes_of(tensors))
    states.append(static_cast<const char*>(tape->state().const_data_ptr()), tape->state().nbytes());
  return states;
}

void set_deferred_generators(const std::vector<at::Tensor>& tensors, const std::string& states) {
  std::size_t at = 0;
  for (const auto& tape : tapes_of(tensors)) {
    auto state = at::empty_like(tape->state());
    // Another model has more recordings; the caller's comparison of models reports that.
    if (at + state.nbytes() > states.size()) return;
    std::memcpy(state.data_ptr(), states.data() + at, state.nbytes());
    at += state.nbytes();
    tape->move_generator(std::move(state));
  }
}

void replay_deferred(const std::vector<at::Tensor>& tensors, const std::function<void(std::size_t)>& finished) {
  Index index;
  const auto tapes = tapes_of(tensors, &index);
  std::set<c10::StorageImpl*> done;
  const auto finish = [&](c10::StorageImpl* storage) {
    const auto found = index.find(storage);
    if (found == index.end() || !done.insert(storage).second) return;
    for (const auto i : found->second) finished(i);
  };
  // Leaves the generator as an eager build would, even if nothing was drawn here because of an earlier catch-up.
  for (const auto& tape : tapes) {
    tape->replay([&](c10::StorageImpl* storage, std::size_t left) {
      if (left == 0) finish(storage);
    });
    if (!tape->moved()) set_default_state(tape->state());
  }
  for (const auto& [place, i] : elsewhere_of(tensors, index)) {
    fill_elsewhere(tensors[i]);
    finish(tensors[i].storage().unsafeGetStorageImpl());
  }
  for (const auto& [storage, parts] : index) {
    if (done.contains(storage)) continue;
    if (has_no_data(tensors[parts.front()])) DeferredTape::fill(storage, at::kCPU);
    finish(storage);
  }
}

}  // namespace zero::torch_hooks
