#include "torch_hooks/storage_access.h"

#include <ATen/ATen.h>

namespace zero::torch_hooks {
namespace {

// The read guard's flag is private, and libtorch has no public reset. An explicit template instantiation may
// legally name a private member.
template <auto Member>
struct ReachGuard {
  friend bool& guard_flag(c10::StorageImpl& storage) { return storage.*Member; }
};
bool& guard_flag(c10::StorageImpl& storage);
template struct ReachGuard<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

c10::DataPtr pointer_into(const at::Tensor& buffer, std::int64_t byte_offset) {
  auto* owner = new at::Storage(buffer.storage());
  auto* data = static_cast<char*>(buffer.data_ptr()) + byte_offset;
  return c10::DataPtr(
      data, owner, [](void* o) { delete static_cast<at::Storage*>(o); }, buffer.device());
}

at::Tensor over(c10::DataPtr data, at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  const auto bytes = c10::multiply_integers(sizes) * static_cast<std::int64_t>(at::elementSize(dtype));
  auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<std::size_t>(bytes),
                                            std::move(data), nullptr, /*resizable=*/false);
  const auto key = device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), c10::DispatchKeySet(key),
                                                         at::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace

at::Tensor alias(const at::Tensor& buffer, std::int64_t byte_offset, at::IntArrayRef sizes, at::ScalarType dtype) {
  return over(pointer_into(buffer, byte_offset), sizes, dtype, buffer.device());
}

at::Tensor without_data(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  return over(c10::DataPtr(nullptr, device), sizes, dtype, device);
}

void release_storage(const c10::Storage& handle, const std::string& text) {
  auto* storage = handle.unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  guard_storage(*storage, text);
}

void guard_storage(c10::StorageImpl& storage, const std::string& text) {
  auto data = std::move(storage._mutable_data_ptr_no_checks());  // its context stays
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(text);
  storage.set_data_ptr_noswap(std::move(data));
}

void fill_storage(c10::StorageImpl& storage, c10::DataPtr data) {
  guard_flag(storage) = false;  // before set_data_ptr_noswap, which recomputes the check from it
  storage.set_data_ptr_noswap(std::move(data));
}

void gather_storage(const c10::Storage& handle, const at::Tensor& buffer, std::int64_t byte_offset) {
  fill_storage(*handle.unsafeGetStorageImpl(), pointer_into(buffer, byte_offset));
}

bool has_no_data(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return false;
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  return storage->nbytes() > 0 && storage->_mutable_data_ptr_no_checks().get() == nullptr;
}

}  // namespace zero::torch_hooks
