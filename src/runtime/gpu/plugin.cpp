// Finds and loads the two libraries, in the order that libtorch requires.
#include "gpu/plugin.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <dlfcn.h>

#include <filesystem>

#include "base/check.h"
#include "base/system.h"
#include "net/transport_choice.h"

namespace zero::cuda {
namespace {

namespace fs = std::filesystem;

std::string error_of_dlopen() {
  const char* text = dlerror();
  return text == nullptr ? "no reason" : text;
}

const Interface* served_by = nullptr;

Plugin open() {
  if (served_by != nullptr) return {served_by, "", ""};
  // Queries the driver, then the runtime: a query to torch before its library is loaded would fix its answer.
  int gpus = net::visible_gpus();
  if (gpus == 0)
    return {nullptr, "no GPU, or no CUDA driver (libcuda.so.1), on this machine", "leave the model on the CPU."};
  const auto path = base::plugin_path(kPlugin);
  std::error_code ignored;
  if (!fs::exists(path, ignored))
    return {nullptr, "no plug-in at " + path.string(), "build with the CUDA 13 toolkit, -DZERO_CUDA=ON."};
  void* plugin = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (plugin == nullptr)
    return {nullptr, "'" + error_of_dlopen() + "' opening " + path.string(), "build libzero and its plug-in together."};
  const auto entry = reinterpret_cast<Entry>(dlsym(plugin, kEntry));
  const auto* interface = entry == nullptr ? nullptr : entry();
  if (interface == nullptr || interface->version != kInterfaceVersion)
    return {nullptr, "a plug-in of another build at " + path.string(), "build libzero and its plug-in together."};
  if (const int status = interface->device_count(&gpus); status != 0 || gpus == 0)
    return {nullptr, base::join("'", interface->error_text(status), "' from the CUDA runtime, ", gpus, " devices"),
            "the driver must be as new as the CUDA 13 runtime needs (580 or newer)."};
  // Never closed: its kernels are registered for the life of the process.
  const auto torch_cuda = base::folder_of(reinterpret_cast<const void*>(&at::globalContext)) / "libtorch_cuda.so";
  if (dlopen(torch_cuda.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr)
    return {nullptr, "'" + error_of_dlopen() + "' opening " + torch_cuda.string(),
            "run script/setup --cuda: libtorch's CUDA libraries must be installed next to it (nvidia/...)."};
  if (!at::detail::getCUDAHooks().hasCUDA())
    return {nullptr, "a libtorch that reports no CUDA although its CUDA library is loaded and the driver reports a GPU",
            "call zero::default_device first: something in this process queried libtorch for CUDA before."};
  return {interface, "", ""};
}

}  // namespace

const Plugin& plugin() {
  static const Plugin opened = open();
  return opened;
}

void serve_gpu_by(const Interface* kernels) { served_by = kernels; }

const Interface& interface(const char* where) {
  if (plugin().interface == nullptr)
    throw ConfigError(
        base::join(where, " got ", plugin().reason, ", expected a GPU that libzero can use. Hint: ", plugin().hint));
  return *plugin().interface;
}

int num_gpus() {
  int gpus = 0;
  check(interface("[cuda::num_gpus]").device_count(&gpus), "device_count");
  return gpus;
}

void check(int status, const char* what) {
  const auto* interface = plugin().interface;
  ZERO_CHECK(status == 0, "[cuda::", what, "] got '",
             interface == nullptr ? base::join("status ", status) : interface->error_text(status),
             "', expected success");
}

}  // namespace zero::cuda
