// The plug-in's kernels on a GPU without libtorch: for compute-sanitizer, which would otherwise follow all of
// libtorch's kernels and allocations. Every argument has an allocation of its own that ends with it, so an access
// behind it is seen.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpu/device_kernels.h"
#include "kernels/cuda/interface.h"
#include "net/transport_choice.h"

namespace zero::test::alone_test {
namespace {

// By name first: a packed build has its libraries where the loader looks.
void* open_library(const std::string& name, const std::string& folder) {
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) library = dlopen((folder + "/" + name).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  return library;
}

// Of the CUDA runtime that the plug-in has loaded.
struct Runtime {
  int (*allocate)(void**, std::size_t);
  int (*release)(void*);
  int (*copy)(void*, const void*, std::size_t, int);
  int (*synchronize)();
  const cuda::Interface* kernels;

  Runtime() {
    void* plugin = open_library(cuda::kPlugin, std::string(ZERO_BINARY_DIR) + "/lib");
    const auto entry = reinterpret_cast<cuda::Entry>(dlsym(plugin, cuda::kEntry));
    kernels = entry == nullptr ? nullptr : entry();
    if (kernels == nullptr || kernels->version != cuda::kInterfaceVersion)
      throw std::runtime_error("a plug-in of another build");
    void* cudart = open_library("libcudart.so.13", "");
    const auto find = [&](const char* name, auto*& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(cudart, name));
      if (function == nullptr) throw std::runtime_error(name);
    };
    find("cudaMalloc", allocate);
    find("cudaFree", release);
    find("cudaMemcpy", copy);
    find("cudaDeviceSynchronize", synchronize);
  }
  void check(int status, const char* what) const {
    if (status != 0) throw std::runtime_error(std::string(what) + ": " + kernels->error_text(status));
  }
};

const Runtime& runtime() {
  static const Runtime loaded;
  return loaded;
}

constexpr int kToDevice = 1, kToHost = 2;

// Host memory brought to the GPU at the same offset from an address that divides by 16, and back.
class Copy {
 public:
  Copy(const void* host, std::size_t bytes) : host_(const_cast<void*>(host)), bytes_(bytes) {
    if (host == nullptr) return;
    offset_ = reinterpret_cast<std::uintptr_t>(host) % 16;
    runtime().check(runtime().allocate(&memory_, std::max<std::size_t>(offset_ + bytes, 1)), "cudaMalloc");
    if (bytes > 0) runtime().check(runtime().copy(data(), host_, bytes, kToDevice), "cudaMemcpy");
  }
  Copy(Copy&& other) noexcept
      : host_(other.host_),
        memory_(std::exchange(other.memory_, nullptr)),
        bytes_(other.bytes_),
        offset_(other.offset_) {}
  Copy& operator=(Copy&&) = delete;
  ~Copy() {
    if (memory_ != nullptr) runtime().release(memory_);
  }
  static const cuda::Interface& table() { return *runtime().kernels; }
  static void done(int status) {
    runtime().check(status, "launch");
    runtime().check(runtime().synchronize(), "kernel");
  }
  void* data() const { return memory_ == nullptr ? nullptr : static_cast<char*>(memory_) + offset_; }
  void bring_back() const {
    if (bytes_ > 0 && memory_ != nullptr) runtime().check(runtime().copy(host_, data(), bytes_, kToHost), "cudaMemcpy");
  }

 private:
  void* host_;
  void* memory_ = nullptr;
  std::size_t bytes_, offset_ = 0;
};

DeviceKernels<Copy> alone;

#define ZERO_NEEDS_A_DRIVER() \
  if (net::visible_gpus() == 0) GTEST_SKIP() << "no GPU, or no CUDA driver (libcuda.so.1), on this machine"

}  // namespace

TEST(GpuAlone, ScalesAndFindsNonFiniteValues) {
  ZERO_NEEDS_A_DRIVER();
  check_scaling(alone);
  check_non_finite(alone);
}
TEST(GpuAlone, SumsOfSquares) {
  ZERO_NEEDS_A_DRIVER();
  check_square_sums(alone);
}
TEST(GpuAlone, Updates) {
  ZERO_NEEDS_A_DRIVER();
  check_updates(alone);
  check_norms(alone);
}
TEST(GpuAlone, AddsAndConverts) {
  ZERO_NEEDS_A_DRIVER();
  check_conversions(alone);
  check_sums(alone);
}

}  // namespace zero::test::alone_test
