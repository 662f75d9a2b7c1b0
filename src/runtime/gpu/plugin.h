// Loads libtorch's CUDA library and the kernels of libzero_cuda.so, at the first query and only if the CUDA driver
// reports a GPU. Programs link to neither.
//
// [Note: asked too early] libtorch decides at the first query whether it has CUDA. If a program queries it
// (torch::cuda::is_available(), a tensor on the GPU) before the library is loaded, the answer is "no" for the life of
// the process. zero::default_device and Engine therefore call plugin() first.
#pragma once
#include <string>

#include "kernels/cuda/interface.h"

namespace zero::cuda {

struct Plugin {
  const Interface* interface = nullptr;  // null: GPUs cannot be used, see `reason`
  std::string reason, hint;
};

// Loads at the first call; the result never changes. Throws only if out of memory. Thread-safe.
const Plugin& plugin();

// For tests without a GPU: these kernels serve the GPU that the test has given to libtorch; nothing is loaded. Before
// the first query.
void serve_gpu_by(const Interface* kernels);

// plugin().interface; throws ConfigError with the reason. `where` as in "[Engine]".
const Interface& interface(const char* where);

// GPUs that the CUDA runtime shows. ConfigError for an unusable GPU.
int num_gpus();

// Throws InternalError for a status other than 0.
void check(int status, const char* what);

}  // namespace zero::cuda
