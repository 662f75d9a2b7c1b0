// The choice between a rank's GPU and the CPU.
#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <zero/communicator.h>
#include <zero/device.h>

#include "base/check.h"
#include "comm/group.h"
#include "gpu/plugin.h"

namespace zero {

std::string why_no_gpu(const Communicator& comm) {
  if (comm.size() > 1 && !comm::group_of(comm)->takes_gpu_memory())
    return base::join("transport ", comm.transport(), " joins the ranks, and it does not move GPU memory");
  const auto& plugin = cuda::plugin();
  if (plugin.interface == nullptr) return plugin.reason;
  const int gpus = cuda::num_gpus();
  if (comm::group_of(comm)->gpu_index(gpus) < 0)
    return base::join(gpus, " GPUs for ", comm.local_size(),
                      " ranks on this host (ZERO_SHARE_GPU=1 lets ranks share one)");
  return "";
}

c10::Device default_device(const Communicator& comm) {
  if (!why_no_gpu(comm).empty()) return c10::kCPU;
  const c10::Device device(c10::kCUDA,
                           static_cast<c10::DeviceIndex>(comm::group_of(comm)->gpu_index(cuda::num_gpus())));
  c10::impl::VirtualGuardImpl(c10::kCUDA).setDevice(device);
  return device;
}

}  // namespace zero
