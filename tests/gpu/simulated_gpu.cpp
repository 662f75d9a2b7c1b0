#include "gpu/simulated_gpu.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <stdexcept>
#include <utility>

#include "gpu/host_kernels.h"
#include "gpu/plugin.h"
#include "gpu/simulated_memory.h"
#include "kernels/elementwise.h"

namespace zero::test::simulated_gpu {
namespace {

using Access = HappensBefore::Access;

constexpr auto kType = c10::DeviceType::CUDA;
c10::Device the_gpu(kType, 0);  // of this process
c10::DeviceIndex num_gpus_of_host = 1;
c10::DeviceIndex num_gpus() { return num_gpus_of_host; }
constexpr int kStreamsPerPool = 4;  // then the pool's streams are used again, as CUDA's 32 are

thread_local c10::StreamId current = 0;
std::atomic<bool> queries_fail{false};
int current_stream() { return static_cast<int>(current); }
c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, the_gpu, id); }

Machine& machine() { return Machine::get(); }

// --- streams, events, memory ----------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return the_gpu; }
  c10::Device getDevice() const override { return the_gpu; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return num_gpus(); }

  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool high) const override {
    static std::atomic<int> next{0};
    return stream_of(1 + (high ? kStreamsPerPool : 0) + next++ % kStreamsPerPool);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStreamFromGlobalPool(device, false); }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream_of(std::exchange(current, next.id())); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override {
    return machine().query(machine().recorded(static_cast<int>(stream.id())));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    machine().host_waits_for(static_cast<int>(stream.id()));
  }
  void synchronizeDevice(c10::DeviceIndex) const override { machine().host_waits_for_all(); }

  static HappensBefore::Clock& clock(void* event) { return *static_cast<HappensBefore::Clock*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new HappensBefore::Clock;
    clock(*event) = machine().recorded(static_cast<int>(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) machine().stream_waits(static_cast<int>(stream.id()), clock(event));
  }
  bool queryEvent(void* event) const override {
    if (queries_fail) throw std::runtime_error("CUDA error: an illegal memory access was encountered");
    return event == nullptr || machine().query(clock(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) machine().host_waits(clock(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<HappensBefore::Clock*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream&) const override {
    machine().keep(data.get());
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct DeviceMemory final : c10::DeviceAllocator {
  static void free(void* data) { machine().free_device(data); }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_nothing, the_gpu};
    void* const data = machine().allocate_device(bytes, current_stream());
    return {data, data, &free, the_gpu};
  }
  static void free_nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void*, const void*, std::size_t) const override { throw std::logic_error("copy_data"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream) override { machine().keep(data.get()); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      (*bytes)[0].current = static_cast<std::int64_t>(machine().allocated());
      (*bytes)[0].peak = static_cast<std::int64_t>(machine().allocated_peak());
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { machine().reset_peak(); }
} device_memory;

struct PinnedMemory final : at::HostAllocator {
  static void free(void* data) { machine().free_pinned(data); }
  at::DataPtr allocate(size_t bytes) override {
    void* const data = machine().allocate_pinned(bytes);
    return {data, data, &free, at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // allocate_pinned looks for itself
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_memory;

// The name under which libtorch looks for it.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return num_gpus(); }
  int getNumGPUs() const override { return num_gpus(); }
  c10::DeviceIndex current_device() const override { return the_gpu.index(); }
  c10::DeviceIndex getCurrentDevice() const override { return the_gpu.index(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return the_gpu.index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return the_gpu.index(); }
  at::Device getDeviceFromPtr(void*) const override { return the_gpu; }
  bool isPinnedPtr(const void* data) const override { return machine().is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = at::detail::createCPUGenerator();
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(c10::DeviceIndex) const override { machine().host_waits_for_all(); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// --- operators ------------------------------------------------------------------------------------

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           dtype.value_or(at::kFloat));
}

void* address_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  auto* const storage = tensor.storage().unsafeGetStorageImpl();
  auto* const data = static_cast<char*>(storage->_mutable_data_ptr_no_checks().get());
  return data == nullptr ? nullptr : data + tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
}

// From the first element to the last, with what lies between them.
std::int64_t bytes_spanned(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return (last + 1) * static_cast<std::int64_t>(tensor.element_size());
}

// The tensors of an operator, as CPU tensors over the same memory.
class OnHost {
 public:
  at::Tensor operator()(const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.device() != the_gpu && !machine().is_pinned(address_of(tensor)))) return tensor;
    auto* const storage = tensor.storage().unsafeGetStorageImpl();
    auto& host = storages_[storage];
    if (!host) {
      auto* const data = storage->_mutable_data_ptr_no_checks().get();
      host = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
          c10::DataPtr(data == nullptr ? nullptr : machine().reach(data), c10::kCPU), c10::GetAllocator(c10::kCPU),
          /*resizable=*/true);
    }
    auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(host),
                                                          c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.is_conj()) alias._set_conj(true);
    made_.push_back({alias, tensor, false});
    return alias;
  }

  // The device's tensor for an operator's result: an argument, a view of one, or a new tensor.
  at::Tensor back(const at::Tensor& result, std::vector<Access>& accesses) {
    if (!result.defined() || result.device() == the_gpu) return result;
    for (auto& made : made_)
      if (made.alias.unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) {
        follow(made, accesses);
        return made.tensor;
      }
    for (const auto& [alias, tensor, followed] : made_)
      if (result.storage().unsafeGetStorageImpl() == alias.storage().unsafeGetStorageImpl() && result.numel() > 0) {
        auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                             tensor.key_set(), result.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
        return view;
      }
    return fresh(result, accesses);
  }

  // Arguments that were resized, also without being a result.
  void follow_all(std::vector<Access>& accesses) {
    for (auto& made : made_)
      if (made.tensor.device() == the_gpu) follow(made, accesses);
  }

 private:
  struct Made {
    at::Tensor alias, tensor;
    bool followed = false;
  };

  static at::Tensor fresh(const at::Tensor& result, std::vector<Access>& accesses) {
    auto there = empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, {}, {});
    const auto bytes = bytes_spanned(result);
    if (bytes > 0) {
      std::memcpy(machine().reach(address_of(there)), result.const_data_ptr(), static_cast<std::size_t>(bytes));
      accesses.push_back(Machine::writes(address_of(there), bytes));
    }
    return there;
  }

  static void follow(Made& made, std::vector<Access>& accesses) {
    const auto& [alias, tensor, followed] = made;
    if (std::exchange(made.followed, true)) return;
    auto* const impl = tensor.unsafeGetTensorImpl();
    if (alias.numel() > 0 &&
        alias.storage().data() !=
            machine().reach(tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get()))
      impl->set_storage_keep_dtype(fresh(alias, accesses).storage());
    else if (alias.sizes() == tensor.sizes() && alias.strides() == tensor.strides())
      return;
    impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }

  std::map<c10::StorageImpl*, c10::intrusive_ptr<c10::StorageImpl>> storages_;
  std::vector<Made> made_;
};

// Operators whose result the host needs, or whose result's size depends on values.
bool host_waits_for(const c10::FunctionSchema& schema) {
  static const std::set<std::string> kByValue{
      "aten::nonzero",  "aten::masked_select",      "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::bincount", "aten::_local_scalar_dense"};
  if (kByValue.count(schema.name()) > 0) return true;
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.type()->kind() == c10::TypeKind::BoolType || result.type()->kind() == c10::TypeKind::NumberType;
  });
}

c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorList()) list.push_back(change(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
      list.push_back(each.has_value() ? std::optional(change(*each)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(c10::kCPU);
  return value;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto& results = schema.returns();
  const bool is_view = std::any_of(results.begin(), results.end(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
  OnHost on_host;
  std::vector<Access> accesses;
  std::vector<at::Tensor> written;
  const auto given = torch::jit::last(*stack, arguments.size()).vec();
  torch::jit::drop(*stack, arguments.size());
  for (std::size_t i = 0; i < given.size(); ++i) {
    const bool write = arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    stack->push_back(map_tensors(given[i], [&](const at::Tensor& tensor) {
      if (!is_view && tensor.defined() && tensor.device() == the_gpu) {
        if (address_of(tensor) == nullptr && tensor.numel() > 0)
          throw std::runtime_error(schema.name() + " of a tensor without data");
        if (write)
          written.push_back(tensor);
        else
          accesses.push_back(Machine::reads(address_of(tensor), bytes_spanned(tensor)));
      }
      return on_host(tensor);
    }));
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(*stack);
  }
  const auto returned = torch::jit::last(*stack, results.size()).vec();
  torch::jit::drop(*stack, results.size());
  for (const auto& value : returned)
    stack->push_back(map_tensors(value, [&](const at::Tensor& result) { return on_host.back(result, accesses); }));
  on_host.follow_all(accesses);
  if (is_view) return;
  for (const auto& tensor : written)  // now, because it may have been resized
    accesses.push_back(Machine::writes(address_of(tensor), bytes_spanned(tensor)));
  machine().operation(current_stream(), schema.name(), accesses);
  if (host_waits_for(schema)) machine().host_waits_for(current_stream());
}

// Asynchronous between device memories, and with pinned memory if it may; else the host waits as CUDA makes it wait.
at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.numel() == 0) return to;
  const auto source = from.expand(to.sizes());
  OnHost on_host;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    on_host(to).copy_(on_host(source));
  }
  machine().operation(
      current_stream(), "aten::copy_",
      {Machine::reads(address_of(source), bytes_spanned(source)), Machine::writes(address_of(to), bytes_spanned(to))});
  const auto& host = to.device() == the_gpu ? from : to;
  if (host.device() == the_gpu) return to;
  const bool pageable = !machine().is_pinned(address_of(host));
  if (!non_blocking || (pageable && to.is_cpu())) machine().host_waits_for(current_stream());
  return to;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, std::int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(
      size, stride.empty() && size.size() > 1 ? c10::IntArrayRef(c10::contiguous_strides(size)) : stride, offset);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(at::Tensor& self, at::Stream) { machine().keep(address_of(self)); }

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("record_stream", &record_stream);
  // These would be composed of other operators here, with other bits than the CPU's kernels.
  for (const char* name : {"native_layer_norm", "native_group_norm"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// --- the plug-in ----------------------------------------------------------------------------------

int stream_number(cuda::Place place) { return static_cast<int>(reinterpret_cast<std::intptr_t>(place.stream)); }

std::int64_t bytes(kernels::Dtype dtype, std::int64_t numel) {
  return static_cast<std::int64_t>(kernels::size_of(dtype)) * numel;
}

template <class T>
T* reach(T* data) {
  return data == nullptr ? nullptr : static_cast<T*>(machine().reach(data));
}

void launched(cuda::Place place, const char* name, std::vector<Access> accesses) {
  for (const auto& access : accesses) {
    const auto* const data = reinterpret_cast<const void*>(access.begin);
    if (access.bytes > 0 && !machine().is_device(data) && !machine().is_pinned(data))
      machine().add_fault(std::string(name) + " of host memory that is not pinned");
  }
  machine().operation(stream_number(place), name, std::move(accesses));
}

int sum_parts(cuda::Place place, void* out, kernels::Dtype out_dtype, const void* const* parts, int count,
              kernels::Dtype in_dtype, std::int64_t numel) {
  std::vector<Access> accesses{Machine::writes(out, bytes(out_dtype, numel))};
  std::vector<const void*> reached;
  for (int p = 0; p < count; ++p) {
    accesses.push_back(Machine::reads(parts[p], bytes(in_dtype, numel)));
    reached.push_back(reach(parts[p]));
  }
  launched(place, "zero::sum_parts", accesses);
  return host_kernels().sum_parts(place, reach(out), out_dtype, reached.data(), count, in_dtype, numel);
}

int convert(cuda::Place place, void* out, kernels::Dtype out_dtype, const void* in, kernels::Dtype in_dtype,
            std::int64_t numel) {
  launched(place, "zero::convert",
           {Machine::reads(in, bytes(in_dtype, numel)), Machine::writes(out, bytes(out_dtype, numel))});
  return host_kernels().convert(place, reach(out), out_dtype, reach(in), in_dtype, numel);
}

int accumulate(cuda::Place place, void* to, kernels::Dtype to_dtype, const void* in, kernels::Dtype in_dtype,
               std::int64_t numel) {
  launched(place, "zero::accumulate",
           {Machine::reads(in, bytes(in_dtype, numel)), Machine::writes(to, bytes(to_dtype, numel))});
  return host_kernels().accumulate(place, reach(to), to_dtype, reach(in), in_dtype, numel);
}

int scale(cuda::Place place, void* data, kernels::Dtype dtype, float factor, std::int64_t numel) {
  launched(place, "zero::scale", {Machine::writes(data, bytes(dtype, numel))});
  return host_kernels().scale(place, reach(data), dtype, factor, numel);
}

int sums_of_squares(cuda::Place place, const cuda::SquaredVector* vectors, int count, double* pieces) {
  std::vector<Access> accesses;
  std::vector<cuda::SquaredVector> reached(vectors, vectors + count);
  std::int64_t num_pieces = 0;
  for (auto& vector : reached) {
    accesses.push_back(Machine::reads(vector.in, bytes(vector.dtype, vector.numel)));
    accesses.push_back(Machine::writes(vector.result, sizeof(double)));
    num_pieces += cuda::square_pieces(vector.numel);
    vector.in = reach(vector.in);
    vector.result = reach(vector.result);
  }
  accesses.push_back(Machine::writes(pieces, num_pieces * static_cast<std::int64_t>(sizeof(double))));
  launched(place, "zero::sums_of_squares", accesses);
  return host_kernels().sums_of_squares(place, reached.data(), count, reach(pieces));
}

int first_non_finite(cuda::Place place, const void* in, kernels::Dtype dtype, std::int64_t numel,
                     std::int64_t* result) {
  launched(place, "zero::first_non_finite",
           {Machine::reads(in, bytes(dtype, numel)), Machine::writes(result, sizeof *result)});
  return host_kernels().first_non_finite(place, reach(in), dtype, numel, reach(result));
}

// The ranges as operations reach them; their accesses are added.
std::vector<kernels::SizedRange> reach(const kernels::SizedRange* ranges, int count, std::vector<Access>& accesses) {
  std::vector<kernels::SizedRange> reached(ranges, ranges + count);
  for (auto& [range, numel] : reached) {
    accesses.push_back(Machine::writes(range.master, bytes(range.master_dtype, numel)));
    accesses.push_back(Machine::reads(range.gradient, bytes(range.gradient_dtype, numel)));
    range.master = reach(range.master);
    range.gradient = reach(range.gradient);
    for (auto*& slot : range.slots)
      if (slot != nullptr) {
        accesses.push_back(Machine::writes(slot, bytes(range.slot_dtype, numel)));
        slot = reach(slot);
      }
    if (range.parameter != nullptr)
      accesses.push_back(Machine::writes(range.parameter, bytes(range.parameter_dtype, numel)));
    range.parameter = reach(range.parameter);
  }
  return reached;
}

int update(cuda::Place place, const kernels::UpdateConstants* constants, float factor,
           const kernels::SizedRange* ranges, int count) {
  std::vector<Access> accesses;
  const auto reached = reach(ranges, count, accesses);
  launched(place, "zero::update", accesses);
  return host_kernels().update(place, constants, factor, reached.data(), count);
}

int update_by_norm(cuda::Place place, const kernels::UpdateConstants* constants, const cuda::StepNorm* norm,
                   const kernels::SizedRange* ranges, int count) {
  std::vector<Access> accesses{Machine::reads(norm, sizeof *norm)};
  const auto reached = reach(ranges, count, accesses);
  launched(place, "zero::update", accesses);
  return host_kernels().update_by_norm(place, constants, reach(norm), reached.data(), count);
}

int add_sums(cuda::Place place, const double* sums, const int* order, int count, std::uint64_t tag, double* out) {
  std::vector<Access> accesses{Machine::writes(out, 2 * sizeof *out)};
  for (int k = 0; k < count; ++k)
    if (order[k] >= 0) accesses.push_back(Machine::reads(sums + order[k], sizeof *sums));
  launched(place, "zero::add_sums", accesses);
  return host_kernels().add_sums(place, reach(sums), order, count, tag, reach(out));
}

int step_norm(cuda::Place place, const double* parts, int num_parts, cuda::NormSettings settings,
              cuda::StepNorm* norm) {
  launched(place, "zero::step_norm",
           {Machine::reads(parts, 2 * num_parts * static_cast<std::int64_t>(sizeof *parts)),
            Machine::writes(norm, sizeof *norm)});
  return host_kernels().step_norm(place, reach(parts), num_parts, settings, reach(norm));
}

const cuda::Interface& kernels_of_device() {
  static const cuda::Interface table = [] {
    auto made = host_kernels();
    made.sum_parts = &sum_parts;
    made.convert = &convert;
    made.accumulate = &accumulate;
    made.scale = &scale;
    made.sums_of_squares = &sums_of_squares;
    made.first_non_finite = &first_non_finite;
    made.update = &update;
    made.update_by_norm = &update_by_norm;
    made.add_sums = &add_sums;
    made.step_norm = &step_norm;
    made.device_count = [](int* count) {
      *count = num_gpus();
      return 0;
    };
    made.allocate_host = [](int, std::size_t bytes, void** data) {
      *data = machine().allocate_pinned(bytes);
      return 0;
    };
    made.free_host = [](int, void* data, std::size_t) {
      machine().free_host(data);
      return 0;
    };
    return made;
  }();
  return table;
}

}  // namespace

void install() {
  c10::SetAllocator(kType, &device_memory, /*priority=*/100);
  at::setHostAllocator(kType, &pinned_memory, /*priority=*/100);
  cuda::serve_gpu_by(&kernels_of_device());
  if (!at::globalContext().hasCUDA()) throw std::runtime_error("libtorch was asked for a GPU before the simulated one");
  at::globalContext().lazyInitDevice(kType);
}

void be_device(int index, int count) {
  the_gpu = c10::Device(kType, static_cast<c10::DeviceIndex>(index));
  num_gpus_of_host = static_cast<c10::DeviceIndex>(count);
}

void fail_queries() { queries_fail = true; }

void answer_queries_with(bool reached) { machine().queries_are_reached = reached; }

std::vector<std::string> take_faults() { return machine().take_faults(); }

std::vector<std::string> take_operations() { return machine().take_operations(); }

}  // namespace zero::test::simulated_gpu
