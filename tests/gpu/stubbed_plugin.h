// The real libzero_cuda.so with a CUDA runtime that only notes its calls (gpu/stub_cudart.h), and what tests of it say
// with. For the program that links to that runtime.
#pragma once
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpu/stub_cudart.h"
#include "kernels/cuda/launches.h"

namespace zero::test::launches_test {

using cuda::Dtype, cuda::Place;
using kernels::Rule, kernels::SizedRange, kernels::UpdateConstants;

inline constexpr std::int64_t kNumels[] = {
    1, 3, 65535, 65536, 65537, std::int64_t{1} << 31, (std::int64_t{1} << 31) + 5};
inline constexpr Dtype kDtypes[] = {Dtype::F32, Dtype::BF16, Dtype::F16};
inline constexpr int kInvalidValue = 1;  // cudaErrorInvalidValue

inline StubCudart& stub() { return *zero_stub_cudart(); }

inline std::filesystem::path plugin_path() { return std::filesystem::path(ZERO_BINARY_DIR) / "lib" / cuda::kPlugin; }

inline const cuda::Interface& open_plugin(const std::filesystem::path& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  const auto entry = reinterpret_cast<cuda::Entry>(dlsym(library, cuda::kEntry));
  if (entry == nullptr || entry()->version != cuda::kInterfaceVersion) throw std::runtime_error("another interface");
  return *entry();
}

inline const cuda::Interface& table() {
  static const auto& loaded = open_plugin(plugin_path());
  return loaded;
}

// Addresses that nothing reads: a multiple of 16 in a range of its own, and `offset` bytes behind.
inline char* address(int number, int offset = 0) {
  return reinterpret_cast<char*>((std::uintptr_t{1} << 44) + (static_cast<std::uintptr_t>(number) << 36)) + offset;
}
inline float* floats(int number, int offset = 0) { return reinterpret_cast<float*>(address(number, offset)); }

inline void* const kStream = address(999);
inline constexpr std::int64_t kNumel = 5000;

class GpuLaunches : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(plugin_path()))
      GTEST_SKIP() << "this build has no " << plugin_path() << " (no nvcc, or ZERO_CUDA=OFF)";
    table();
    ASSERT_GT(stub().registered_kernels, 0) << "the plug-in has another CUDA runtime";
    stub().clear();
  }
  void TearDown() override { stub().clear(); }
};

inline std::vector<StubCall> launches() {
  std::vector<StubCall> found;
  for (const auto& call : stub().calls)
    if (call.function == "LaunchKernel") found.push_back(call);
  return found;
}
inline std::vector<std::string> kernels_launched() {
  std::vector<std::string> names;
  for (const auto& call : launches()) names.push_back(call.kernel);
  return names;
}
inline std::vector<std::string> functions_called() {
  std::vector<std::string> names;
  for (const auto& call : stub().calls) names.push_back(call.function);
  return names;
}
using Names = std::vector<std::string>;

inline void expect_legal(const StubCall& launch) {
  EXPECT_GE(launch.grid[0], 1u);
  EXPECT_LE(launch.grid[0], (1u << 31) - 1);
  EXPECT_GE(launch.block[0], 1u);
  EXPECT_LE(launch.block[0], 1024u);
  for (int axis : {1, 2}) {
    EXPECT_EQ(launch.grid[axis], 1u);
    EXPECT_EQ(launch.block[axis], 1u);
  }
  EXPECT_EQ(launch.shared, 0u);
}

// The only launch has exactly the blocks that `numel` elements need, `per_thread` for each thread.
inline void expect_covers(std::int64_t numel, std::int64_t per_thread) {
  ASSERT_EQ(launches().size(), 1u);
  const auto launch = launches()[0];
  expect_legal(launch);
  const std::int64_t per_block = launch.block[0] * per_thread, blocks = launch.grid[0];
  EXPECT_GE(blocks * per_block, numel);
  EXPECT_LT((blocks - 1) * per_block, numel);
}

inline SizedRange range_of(int number, std::int64_t numel, Dtype gradient = Dtype::BF16) {
  return {{floats(number),
           {floats(number + 1), floats(number + 2), floats(number + 5)},
           address(number + 3),
           gradient,
           address(number + 4),
           Dtype::BF16},
          numel};
}

inline UpdateConstants constants_of(Rule rule) {
  UpdateConstants constants{};
  constants.rule = rule;
  constants.negative_step = -0.25f;
  return constants;
}

inline int squares(Place place, const std::vector<cuda::SquaredVector>& vectors) {
  return table().sums_of_squares(place, vectors.data(), static_cast<int>(vectors.size()),
                                 reinterpret_cast<double*>(address(900)));
}
inline int update(Place place, const std::vector<SizedRange>& ranges, Rule rule = Rule::AdamDecoupled) {
  const auto constants = constants_of(rule);
  return table().update(place, &constants, 0.5f, ranges.data(), static_cast<int>(ranges.size()));
}
inline std::vector<cuda::SquaredVector> vectors_of(int count, std::int64_t numel) {
  std::vector<cuda::SquaredVector> vectors;
  for (int v = 0; v < count; ++v)
    vectors.push_back({address(1), Dtype::BF16, numel, reinterpret_cast<double*>(address(2)) + v});
  return vectors;
}

}  // namespace zero::test::launches_test
