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

#include "gpu/kernel_checks.h"
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
  void* data() const { return memory_ == nullptr ? nullptr : static_cast<char*>(memory_) + offset_; }
  void bring_back() const {
    if (bytes_ > 0 && memory_ != nullptr) runtime().check(runtime().copy(host_, data(), bytes_, kToHost), "cudaMemcpy");
  }

 private:
  void* host_;
  void* memory_ = nullptr;
  std::size_t bytes_, offset_ = 0;
};

class Alone : public Kernels {
 public:
  void sum_parts(void* out, Dtype out_dtype, const void* const* parts, int num_parts, Dtype in_dtype,
                 std::int64_t numel) override {
    const Copy to(out, bytes(out_dtype, numel));
    std::vector<Copy> from;
    std::vector<const void*> pointers;
    for (int p = 0; p < num_parts; ++p) {
      from.emplace_back(parts[p], bytes(in_dtype, numel));
      pointers.push_back(from.back().data());
    }
    done(table().sum_parts(kPlace, to.data(), out_dtype, pointers.data(), num_parts, in_dtype, numel));
    to.bring_back();
  }
  void convert(void* out, Dtype out_dtype, const void* in, Dtype in_dtype, std::int64_t numel) override {
    const Copy to(out, bytes(out_dtype, numel)), from(in, bytes(in_dtype, numel));
    done(table().convert(kPlace, to.data(), out_dtype, from.data(), in_dtype, numel));
    to.bring_back();
  }
  void accumulate(void* to, Dtype to_dtype, const void* in, Dtype in_dtype, std::int64_t numel) override {
    const Copy sum(to, bytes(to_dtype, numel)), from(in, bytes(in_dtype, numel));
    done(table().accumulate(kPlace, sum.data(), to_dtype, from.data(), in_dtype, numel));
    sum.bring_back();
  }
  void scale(void* data, Dtype dtype, float factor, std::int64_t numel) override {
    const Copy values(data, bytes(dtype, numel));
    done(table().scale(kPlace, values.data(), dtype, factor, numel));
    values.bring_back();
  }
  std::vector<double> sums_of_squares(const std::vector<Vector>& vectors) override {
    std::vector<double> results(vectors.size(), -1);
    const Copy there(results.data(), results.size() * sizeof(double));
    std::vector<Copy> copies;
    std::vector<cuda::SquaredVector> all;
    std::int64_t num_pieces = 0;
    for (const auto& [in, dtype, numel] : vectors) {
      copies.emplace_back(in, bytes(dtype, numel));
      all.push_back({copies.back().data(), dtype, numel, static_cast<double*>(there.data()) + all.size()});
      num_pieces += cuda::square_pieces(numel);
    }
    const std::vector<double> scratch(static_cast<std::size_t>(num_pieces) + 1);
    const Copy pieces(scratch.data(), scratch.size() * sizeof(double));
    done(
        table().sums_of_squares(kPlace, all.data(), static_cast<int>(all.size()), static_cast<double*>(pieces.data())));
    there.bring_back();
    return results;
  }
  std::int64_t first_non_finite(const void* in, Dtype dtype, std::int64_t numel) override {
    std::int64_t result = 7;
    const Copy from(in, bytes(dtype, numel)), to(&result, sizeof result);
    done(table().first_non_finite(kPlace, from.data(), dtype, numel, static_cast<std::int64_t*>(to.data())));
    to.bring_back();
    return result;
  }
  void update(const kernels::UpdateConstants& constants, float factor,
              const std::vector<kernels::SizedRange>& ranges) override {
    std::vector<Copy> copies;
    std::vector<kernels::SizedRange> there;
    const auto copy = [&](const void* host, std::size_t size) { return copies.emplace_back(host, size).data(); };
    for (const auto& [range, numel] : ranges) {
      const auto floats = [&, numel = numel](float* host) {
        return static_cast<float*>(copy(host, bytes(Dtype::F32, numel)));
      };
      there.push_back({{floats(range.master),
                        {floats(range.slots[0]), floats(range.slots[1])},
                        copy(range.gradient, bytes(range.gradient_dtype, numel)),
                        range.gradient_dtype,
                        copy(range.parameter, bytes(range.parameter_dtype, numel)),
                        range.parameter_dtype},
                       numel});
    }
    done(table().update(kPlace, &constants, factor, there.data(), static_cast<int>(there.size())));
    for (const auto& each : copies) each.bring_back();
  }

 private:
  static constexpr cuda::Place kPlace{0, nullptr};
  static const cuda::Interface& table() { return *runtime().kernels; }
  static std::size_t bytes(Dtype dtype, std::int64_t numel) {
    return static_cast<std::size_t>(numel) * kernels::size_of(dtype);
  }
  static void done(int status) {
    runtime().check(status, "launch");
    runtime().check(runtime().synchronize(), "kernel");
  }
};

Alone alone;

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
}
TEST(GpuAlone, AddsAndConverts) {
  ZERO_NEEDS_A_DRIVER();
  check_conversions(alone);
  check_sums(alone);
}

}  // namespace zero::test::alone_test
