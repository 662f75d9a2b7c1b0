// Selects a rank's device: its GPU if libzero can use one, else the CPU.
//
//   const auto device = zero::default_device(*comm);
//   model->to(device);                    // before constructing the Engine
//
// Call this before any other query for CUDA. libtorch caches its first answer, which is "no" until libzero has loaded
// libtorch's CUDA library.
#pragma once
#include <string>

#include <zero/export.h>

namespace c10 {
struct Device;
}

namespace zero {

class Communicator;

// Local. The GPU with index local_rank() on this host, which becomes the current device, or the CPU. A GPU requires the
// CUDA driver, libtorch's CUDA libraries (script/setup --cuda) and the plug-in libzero_cuda.so of this build. Several
// ranks also require transport nccl and one GPU each. All ranks of a host get the same kind of device.
ZERO_API c10::Device default_device(const Communicator& comm);

// Local. Why default_device() returns the CPU; empty if it returns a GPU.
ZERO_API std::string why_no_gpu(const Communicator& comm);

}  // namespace zero
