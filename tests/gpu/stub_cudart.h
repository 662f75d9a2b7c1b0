// A CUDA runtime without a GPU: libcudart.so.13 with the functions that the plug-in calls. It notes every call in
// order, and fails the one it is told to. A program that links to it loads the plug-in with it, because the library's
// name is the real one's. Not for several threads.
#pragma once
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace zero::test {

struct StubCall {
  std::string function;  // of the runtime, without __cuda or cuda: SetDevice, LaunchKernel
  int device;            // current at the call; SetDevice: the new one
  void* stream = nullptr;
  // LaunchKernel: the kernel's name and template arguments, its blocks and threads (x, y, z).
  std::string kernel{};
  unsigned grid[3]{}, block[3]{};
  std::size_t shared = 0;  // bytes; HostRegister: of the memory
};

struct StubCudart {
  static constexpr int kDevices = 2;
  static constexpr int kInvalidKernel = 400;  // status of the launch of a kernel that was not found
  std::vector<StubCall> calls;
  int registered_kernels = 0;
  int current_device = 0, last_error = 0;
  // The call of this index, counted from the last clear(), returns `error` and does nothing.
  int fail_at = -1, error = 0;
  // During a launch, while its arguments can be read: one pointer for each parameter of the kernel.
  std::function<void(const StubCall&, void** arguments)> on_launch;

  void clear() {
    calls.clear();
    current_device = last_error = error = 0;
    fail_at = -1;
    on_launch = nullptr;
  }
};

}  // namespace zero::test

extern "C" zero::test::StubCudart* zero_stub_cudart();
