// For all of the program gpu_simulated: the simulated GPU, and that every test left no fault of order behind.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "gpu/device.h"
#include "gpu/simulated_gpu.h"

namespace zero::test {
namespace {

struct NoFaults : ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo& info) override {
    for (const auto& fault : simulated_gpu::take_faults()) ADD_FAILURE() << info.name() << ": " << fault;
  }
};

// Before any test, after all static objects were made.
struct Installed : ::testing::Environment {
  void SetUp() override {
    at::set_num_threads(1);  // libtorch's order of sums depends on it, and a device's backward has a thread of its own
    simulated_gpu::install();
    simulated_faults = &simulated_gpu::take_faults;
    ::testing::UnitTest::GetInstance()->listeners().Append(new NoFaults);  // the last is asked first at a test's end
  }
};
const auto* const kInstalled = ::testing::AddGlobalTestEnvironment(new Installed);

}  // namespace
}  // namespace zero::test
