#include "gpu/stub_cudart.h"

#include <cxxabi.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <utility>

namespace {

using zero::test::StubCall;
using zero::test::StubCudart;

// As in the toolkit's headers, which a machine without it lacks.
struct Shape {
  unsigned x, y, z;
};
struct Configuration {
  Shape grid, block;
  std::size_t shared;
  void* stream;
};

StubCudart stub;
std::map<const void*, std::string> kernels;  // by the address of the host's function
std::vector<Configuration> configurations;

int returned(int status) {
  if (status != 0) stub.last_error = status;
  return status;
}

// Notes the call; true if it has to fail.
bool fails(StubCall call) {
  const bool chosen = static_cast<int>(stub.calls.size()) == stub.fail_at;
  stub.calls.push_back(std::move(call));
  return chosen;
}
bool fails(const char* function, void* stream = nullptr) { return fails({function, stub.current_device, stream}); }

// The name and template arguments of a demangled function: without its namespace, whose name for the file has _kernel
// in it too, and without its parameters.
std::string short_name(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(mangled, nullptr, nullptr, &status), std::free);
  const std::string whole = text ? text.get() : mangled;
  auto at = whole.find("_kernel<");
  if (at == std::string::npos) at = whole.find("_kernel(");
  if (at == std::string::npos) return whole;
  const auto begin = whole.rfind(':', at) + 1;
  return whole.substr(begin, whole.find('(', at) - begin);
}

}  // namespace

extern "C" {

StubCudart* zero_stub_cudart() { return &stub; }

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernels[host] = short_name(name);
  ++stub.registered_kernels;
}

unsigned __cudaPushCallConfiguration(Shape grid, Shape block, std::size_t shared, void* stream) {
  if (fails("PushCallConfiguration", stream)) return static_cast<unsigned>(returned(stub.error));
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
int __cudaPopCallConfiguration(Shape* grid, Shape* block, std::size_t* shared, void** stream) {
  const auto top = configurations.back();
  configurations.pop_back();
  if (fails("PopCallConfiguration", top.stream)) return returned(stub.error);
  *grid = top.grid;
  *block = top.block;
  *shared = top.shared;
  *stream = top.stream;
  return 0;
}
int __cudaGetKernel(const void** kernel, const void* host) {
  if (fails("GetKernel")) return returned(stub.error);
  if (!kernels.count(host)) return returned(StubCudart::kInvalidKernel);
  *kernel = host;
  return 0;
}
int __cudaLaunchKernel(const void* kernel, Shape grid, Shape block, void** arguments, std::size_t shared,
                       void* stream) {
  const auto found = kernels.find(kernel);
  StubCall call{"LaunchKernel", stub.current_device, stream};
  call.kernel = found == kernels.end() ? "" : found->second;
  call.shared = shared;
  for (auto [to, from] : {std::pair{call.grid, grid}, std::pair{call.block, block}}) {
    to[0] = from.x;
    to[1] = from.y;
    to[2] = from.z;
  }
  if (fails(call)) return returned(stub.error);
  if (found == kernels.end()) return returned(StubCudart::kInvalidKernel);
  if (stub.on_launch) stub.on_launch(call, arguments);
  return 0;
}

int cudaGetDevice(int* device) {
  if (fails("GetDevice")) return returned(stub.error);
  *device = stub.current_device;
  return 0;
}
int cudaSetDevice(int device) {
  if (fails({"SetDevice", device})) return returned(stub.error);
  if (device < 0 || device >= StubCudart::kDevices) return returned(101);  // cudaErrorInvalidDevice
  stub.current_device = device;
  return 0;
}
int cudaGetDeviceCount(int* count) {
  if (fails("GetDeviceCount")) return returned(stub.error);
  *count = StubCudart::kDevices;
  return 0;
}
// Returns the last error of any call, and forgets it. Told to fail: an error of an earlier kernel appears.
int cudaGetLastError() {
  if (fails("GetLastError")) stub.last_error = stub.error;
  return std::exchange(stub.last_error, 0);
}
const char* cudaGetErrorString(int status) {
  static std::string text;
  text = "stub error " + std::to_string(status);
  return text.c_str();
}
int cudaMemcpyAsync(void*, const void*, std::size_t, int, void* stream) {
  return fails("MemcpyAsync", stream) ? returned(stub.error) : 0;
}
int cudaMemsetAsync(void*, int, std::size_t, void* stream) {
  return fails("MemsetAsync", stream) ? returned(stub.error) : 0;
}
int cudaHostRegister(void*, std::size_t bytes, unsigned) {
  StubCall call{"HostRegister", stub.current_device};
  call.shared = bytes;
  return fails(call) ? returned(stub.error) : 0;
}
int cudaHostUnregister(void*) { return fails("HostUnregister") ? returned(stub.error) : 0; }

}  // extern "C"
