// Exchanging what is behind a tensor while the tensor stays: a parameter keeps its TensorImpl
// and StorageImpl for life, and only the storage's data pointer changes. Saved views in autograd
// share the StorageImpl, so they see refilled data too; no version counter moves.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

namespace zero::torch_hooks {

// A tensor of the given sizes with a storage of its own whose data lie inside `buffer`, at
// byte_offset; the buffer lives as long as the tensor does.
at::Tensor alias(const at::Tensor& buffer, std::int64_t byte_offset, at::IntArrayRef sizes, at::ScalarType dtype);

// A tensor like alias() without data.
at::Tensor without_data(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);

// Lets go of the data. From now on every read that does not pass the interception throws `text`.
void release_storage(const c10::Storage& storage, const std::string& text);

// Points the storage into `buffer` at byte_offset.
void gather_storage(const c10::Storage& storage, const at::Tensor& buffer, std::int64_t byte_offset);

// True when the storage has room for elements but no data.
bool has_no_data(const at::Tensor& tensor);

}  // namespace zero::torch_hooks
