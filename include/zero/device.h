// Where a rank's model lives: on the rank's GPU where libzero can use one, else on the CPU.
//
//   const auto device = zero::default_device(*comm);
//   model->to(device);                    // before the Engine takes it
//
// Ask this before anything asks libtorch about CUDA: libtorch keeps its first answer, and that is "no" until libzero
// has opened libtorch's CUDA library.
#pragma once
#include <string>

#include <zero/export.h>

namespace c10 {
struct Device;
}

namespace zero {

class Communicator;

// The GPU numbered local_rank() of this host, which becomes the process's current one, or the CPU. A GPU needs the
// CUDA driver, libtorch's CUDA libraries (script/setup --cuda) and the plug-in libzero_cuda.so of this build; several
// ranks need transport nccl besides, and a GPU each. The same kind on all ranks of a host.
ZERO_API c10::Device default_device(const Communicator& comm);

// Why default_device() gives the CPU; empty where it gives a GPU.
ZERO_API std::string why_no_gpu(const Communicator& comm);

}  // namespace zero
