// The choice between a rank's GPU and the CPU.
#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <zero/communicator.h>
#include <zero/device.h>

#include "base/check.h"
#include "gpu/plugin.h"

namespace zero {

std::string why_no_gpu(const Communicator& comm) {
  if (comm.size() > 1 && comm.transport() != "nccl")
    return base::join("transport ", comm.transport(), " joins the ranks, and only nccl moves GPU memory");
  const auto& plugin = cuda::plugin();
  if (plugin.interface == nullptr) return plugin.reason;
  int gpus = 0;
  cuda::check(plugin.interface->device_count(&gpus), "device_count");
  if (comm.local_size() > gpus) return base::join(gpus, " GPUs for ", comm.local_size(), " ranks on this host");
  return "";
}

c10::Device default_device(const Communicator& comm) {
  if (!why_no_gpu(comm).empty()) return c10::kCPU;
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(comm.local_rank()));
  c10::impl::VirtualGuardImpl(c10::kCUDA).setDevice(device);
  return device;
}

}  // namespace zero
