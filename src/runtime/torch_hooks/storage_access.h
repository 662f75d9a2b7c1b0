// Replaces the data of a tensor: a parameter keeps its TensorImpl and StorageImpl for its whole life, and only the
// storage's data pointer changes. Views saved by autograd share the StorageImpl, so they see the new data. Version
// counters do not change.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

namespace zero::torch_hooks {

// A tensor of the given sizes with its own storage, whose data is in `buffer` at byte_offset. Keeps the buffer alive.
at::Tensor alias(const at::Tensor& buffer, std::int64_t byte_offset, at::IntArrayRef sizes, at::ScalarType dtype);

// Like alias(), without data.
at::Tensor without_data(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);

// Releases the data. Later reads that bypass the interception throw `text`.
void release_storage(const c10::Storage& storage, const std::string& text);

// For a storage without data: reads throw `text`.
void guard_storage(c10::StorageImpl& storage, const std::string& text);

// Gives a storage without data its memory, and ends guard_storage().
void fill_storage(c10::StorageImpl& storage, c10::DataPtr data);

// Points the storage into `buffer` at byte_offset.
void gather_storage(const c10::Storage& storage, const at::Tensor& buffer, std::int64_t byte_offset);

// Whether the storage has elements but no data.
bool has_no_data(const at::Tensor& tensor);

}  // namespace zero::torch_hooks
