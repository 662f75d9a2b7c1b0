// Loads NCCL's plug-in, see library.h.
#include <dlfcn.h>

#include <atomic>
#include <filesystem>

#include "base/check.h"
#include "base/system.h"
#include "comm/nccl/library.h"
#include "net/transport_choice.h"

namespace zero::comm::nccl {
namespace {

std::atomic<const Library*> served{nullptr};

[[noreturn]] void refuse(const net::ProcessInfo& identity, const std::string& got, const std::string& hint) {
  throw ConfigError(base::join("[comm::nccl] got ", got, ", expected a GPU and the NCCL plug-in (rank ", identity.rank,
                               "/", identity.size, "). Hint: ", hint));
}

}  // namespace

void serve_by(const Library* table) { served = table; }

const Library& library(const net::ProcessInfo& identity) {
  if (const auto* const table = served.load()) return *table;
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
  void* plugin = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: communicators may live in it
  if (plugin == nullptr) {
    const char* text = dlerror();
    refuse(identity, base::join("'", text == nullptr ? "no reason" : text, "' opening ", path.string()),
           "the CUDA libraries of the torch wheel must be installed next to it (nvidia/...).");
  }
  const auto entry = reinterpret_cast<Entry>(dlsym(plugin, kEntry));
  const auto* const table = entry == nullptr ? nullptr : entry();
  if (table == nullptr || table->version != kVersion)
    refuse(identity, base::join("a plug-in of another version at ", path.string()),
           "build libzero and its plug-in together.");
  return *table;
}

}  // namespace zero::comm::nccl
