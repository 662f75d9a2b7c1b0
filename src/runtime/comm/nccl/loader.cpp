// The "nccl" transport's door: NCCL and CUDA live in a plug-in library of their own, so that libzero
// runs where there is no GPU and no toolkit. It is opened at the first use. Nothing here knows CUDA's types.
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
  // The driver's answer, not torch's: torch keeps its first one, and without the plug-in that is no.
  const int gpus = net::visible_gpus();
  if (gpus == 0)
    refuse(identity, "no GPU, or no CUDA driver (libcuda.so.1)", "use transport shm or gloo on this machine.");
  // Two ranks on one GPU make NCCL fail much later, with less to say.
  if (gpus < identity.local_size) {
    refuse(identity, base::join(gpus, " GPUs for ", identity.local_size, " ranks on this host"),
           "start one rank a GPU.");
  }
  const auto path = base::plugin_path(kPlugin);
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    refuse(identity, base::join("no plug-in at ", path.string()),
           "build with the CUDA 13 toolkit and NCCL, -DZERO_CUDA=ON.");
  }
  // Never closed: torch's CUDA kernels register themselves once for the life of the process.
  void* plugin = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (plugin == nullptr) {
    const char* text = dlerror();
    refuse(identity, base::join("'", text == nullptr ? "no reason" : text, "' opening ", path.string()),
           "the CUDA libraries of the torch wheel must lie beside it (nvidia/...).");
  }
  const auto make = reinterpret_cast<NcclFactory>(dlsym(plugin, kNcclFactory));
  if (make == nullptr)
    refuse(identity, base::join("no ", kNcclFactory, " in ", path.string()), "build libzero and its plug-in together.");
  return std::unique_ptr<Transport>(make(&identity, timeout.count()));
}

}  // namespace zero::comm
