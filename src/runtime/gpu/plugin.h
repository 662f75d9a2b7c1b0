// The door to the GPU: libtorch's own CUDA library and the kernels of libzero_cuda.so, opened together at the first
// question, and only where the CUDA driver shows a GPU. A program that is linked to neither runs everywhere.
//
// [Note: asked too early] libtorch decides once whether it has CUDA, at the first question about it. A program that
// asks (torch::cuda::is_available(), a tensor on the GPU) before this opens its library gets "no" for the life of the
// process; so this is asked first, by zero::default_device and by the Engine.
#pragma once
#include <string>

#include "kernels/cuda/interface.h"

namespace zero::cuda {

struct Door {
  const Interface* interface = nullptr;  // null: GPUs cannot be used, for this reason
  std::string reason, hint;
};

// Opens at the first call, and always gives the same answer. Never throws but for memory. Any thread may call.
const Door& door();

// door().interface; throws ConfigError with the reason. `where` as in "[Engine]".
const Interface& interface(const char* where);

// Throws InternalError for a status other than 0.
void check(int status, const char* what);

}  // namespace zero::cuda
