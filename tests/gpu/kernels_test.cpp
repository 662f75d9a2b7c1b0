// Loading the plug-in on any machine, and its kernels on a GPU: bit-identical to the CPU.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <zero/communicator.h>
#include <zero/device.h>
#include <zero/errors.h>

#include "base/system.h"
#include "gpu/device.h"
#include "gpu/device_kernels.h"
#include "gpu/plugin.h"
#include "kernels/cuda/interface.h"
#include "net/transport_choice.h"

namespace zero::test::kernels_test {
namespace {

// Host memory brought to the GPU at the same offset from an address that divides by 16, and back.
class Copy {
 public:
  Copy(const void* host, std::size_t size) : host_(const_cast<void*>(host)), bytes_(static_cast<std::int64_t>(size)) {
    if (host == nullptr) return;
    offset_ = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(host) % 16);
    // The following bytes must not change.
    memory_ = at::full({offset_ + bytes_ + 64}, 0x5a, at::TensorOptions().dtype(at::kByte).device(at::kCUDA));
    if (bytes_ > 0) part().copy_(at::from_blob(host_, {bytes_}, at::kByte));
  }
  static const cuda::Interface& table() { return *cuda::plugin().interface; }
  static void done(int status) { cuda::check(status, "launch"); }  // bring_back() waits for it
  void* data() const { return memory_.defined() ? static_cast<char*>(memory_.data_ptr()) + offset_ : nullptr; }
  void bring_back() const {
    if (!memory_.defined()) return;
    if (bytes_ > 0) at::from_blob(host_, {bytes_}, at::kByte).copy_(part());
    EXPECT_TRUE(memory_.narrow(0, offset_ + bytes_, 64).eq(0x5a).all().item<bool>()) << "wrote behind the range";
    EXPECT_TRUE(memory_.narrow(0, 0, offset_).eq(0x5a).all().item<bool>()) << "wrote before the range";
  }

 private:
  at::Tensor part() const { return memory_.narrow(0, offset_, bytes_); }
  void* host_;
  std::int64_t bytes_, offset_ = 0;
  at::Tensor memory_;
};

DeviceKernels<Copy> kernels;

}  // namespace

TEST(Plugin, WithoutAGpuTheReasonSaysWhatIsMissingAndWhatToDo) {
  if (net::visible_gpus() > 0) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_EQ(cuda::plugin().interface, nullptr);
  try {
    cuda::interface("[Engine]");
    FAIL() << "kernels without a GPU";
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("[Engine] got no GPU, or no CUDA driver (libcuda.so.1)"), std::string::npos) << text;
    EXPECT_NE(text.find("Hint: leave the model on the CPU"), std::string::npos) << text;
  }
}

TEST(Plugin, WithoutAGpuTheDefaultIsTheCpuForAReason) {
  const auto comm = Communicator::local();
  const auto device = default_device(*comm);
  EXPECT_EQ(device.is_cpu(), !why_no_gpu(*comm).empty());
  EXPECT_EQ(device.is_cpu(), cuda::plugin().interface == nullptr);
  run_ranks(2, [](std::shared_ptr<Communicator> ranks) {
    EXPECT_TRUE(default_device(*ranks).is_cpu());
    EXPECT_EQ(why_no_gpu(*ranks), "transport thread joins the ranks, and it does not move GPU memory");
  });
}

TEST(Plugin, WhereTheDriverShowsAGpuItOpens) {
  if (net::visible_gpus() == 0) GTEST_SKIP() << "no GPU, or no CUDA driver (libcuda.so.1), on this machine";
  EXPECT_NE(cuda::plugin().interface, nullptr) << cuda::plugin().reason;
  EXPECT_TRUE(torch::cuda::is_available());
}

// The library loads without a driver, because it needs only the CUDA runtime, and reports an error.
TEST(PlugIn, LoadsAnywhereAndItsTableIsWhole) {
  const auto path = base::plugin_path(cuda::kPlugin);  // as the library does: a pack has no build folder
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "this build has no " << path << " (no nvcc, or ZERO_CUDA=OFF)";
  void* plugin = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(plugin, nullptr) << dlerror();
  const auto entry = reinterpret_cast<cuda::Entry>(dlsym(plugin, cuda::kEntry));
  ASSERT_NE(entry, nullptr);
  const auto& table = *entry();
  EXPECT_EQ(table.version, cuda::kInterfaceVersion);
  EXPECT_TRUE(table.sum_parts && table.convert && table.accumulate && table.scale && table.sums_of_squares &&
              table.first_non_finite && table.update);
  int count = -1;
  const int status = table.device_count(&count);
  if (net::visible_gpus() > 0) {
    EXPECT_EQ(status, 0) << table.error_text(status);
    EXPECT_GT(count, 0);
  } else {
    EXPECT_NE(status, 0);
    EXPECT_GT(std::strlen(table.error_text(status)), 10u);
    float value = 3;
    EXPECT_NE(table.scale({0, nullptr}, &value, kernels::Dtype::F32, 2.0f, 1), 0) << "a kernel without a GPU";
    EXPECT_EQ(value, 3);
  }
}

TEST(GpuKernels, ConvertAsTheCpuDoes) {
  ZERO_NEEDS_GPU();
  check_conversions(kernels);
}
TEST(GpuKernels, AddAsTheCpuDoes) {
  ZERO_NEEDS_GPU();
  check_sums(kernels);
}
TEST(GpuKernels, ScaleAsTheCpuDoes) {
  ZERO_NEEDS_GPU();
  check_scaling(kernels);
}
TEST(GpuKernels, SquareSumsHaveTheCpusBits) {
  ZERO_NEEDS_GPU();
  check_square_sums(kernels);
}
TEST(GpuKernels, FindTheFirstNonFiniteValue) {
  ZERO_NEEDS_GPU();
  check_non_finite(kernels);
}
TEST(GpuKernels, EveryUpdateRuleHasTheCpusBits) {
  ZERO_NEEDS_GPU();
  check_updates(kernels);
  check_norms(kernels);
}

}  // namespace zero::test::kernels_test
