// Loads the "nccl" transport. NCCL and CUDA are in a separate plug-in library, so that libzero runs without a GPU or
// toolkit. The library is loaded at the first use. No CUDA types.
#include <dlfcn.h>

#include <filesystem>

#include "base/check.h"
#include "base/system.h"
#include "comm/nccl/plugin.h"
#include "comm/transport.h"
#include "net/transport_choice.h"

namespace zero::comm {
namespace {

constexpr const char* kPlugin = "libzero_nccl.so";

[[noreturn]] void refuse(const net::ProcessInfo& identity, const std::string& got, const std::string& hint) {
  throw ConfigError(base::join("[comm::nccl] got ", got, ", expected a GPU and the NCCL plug-in (rank ", identity.rank,
                               "/", identity.size, "). Hint: ", hint));
}

}  // namespace

std::unique_ptr<Transport> make_nccl(const net::ProcessInfo& identity, std::chrono::milliseconds timeout) {
  // Queries the driver instead of torch, which caches its first answer and reports no GPU without the plug-in.
  const int gpus = net::visible_gpus();
  if (gpus == 0)
    refuse(identity, "no GPU, or no CUDA driver (libcuda.so.1)", "use transport shm or gloo on this machine.");
  // With two ranks on one GPU, NCCL fails much later and with less information.
  if (gpus < identity.local_size) {
    refuse(identity, base::join(gpus, " GPUs for ", identity.local_size, " ranks on this host"),
           "start one rank a GPU, or set ZERO_SHARE_GPU=1.");
  }
  const auto path = base::plugin_path(kPlugin);
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    refuse(identity, base::join("no plug-in at ", path.string()),
           "build with the CUDA 13 toolkit and NCCL, -DZERO_CUDA=ON.");
  }
  // Never closed: torch's CUDA kernels are registered for the life of the process.
  void* plugin = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (plugin == nullptr) {
    const char* text = dlerror();
    refuse(identity, base::join("'", text == nullptr ? "no reason" : text, "' opening ", path.string()),
           "the CUDA libraries of the torch wheel must be installed next to it (nvidia/...).");
  }
  const auto make = reinterpret_cast<NcclFactory>(dlsym(plugin, kNcclFactory));
  if (make == nullptr)
    refuse(identity, base::join("no ", kNcclFactory, " in ", path.string()), "build libzero and its plug-in together.");
  return std::unique_ptr<Transport>(make(&identity, timeout.count()));
}

}  // namespace zero::comm
