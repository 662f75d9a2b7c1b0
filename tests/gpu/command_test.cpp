// `--device cuda` without a GPU, or with a driver that reports more than it provides: exit code 2, and an error that
// names the first missing part.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/process.h"

namespace zero::test::command_test {
namespace {

const std::string kZero = std::string(ZERO_BINARY_DIR) + "/bin/zero";

bool has_driver() { return dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) != nullptr; }

struct Ended {
  int code;
  std::string err;
};

Ended run(std::vector<std::string> arguments, const std::string& library_path = "") {
  arguments.insert(arguments.begin(), kZero);
  Process::Settings settings;
  settings.arguments = std::move(arguments);
  settings.folder = temporary_folder();
  if (!library_path.empty()) settings.environment.push_back("LD_LIBRARY_PATH=" + library_path);
  Process process(settings);
  const int code = process.wait(60);
  return {code, process.err};
}

const std::vector<std::string> kTrain{"train",    std::string(ZERO_SOURCE_DIR) + "/configs/gpt-demo.json",
                                      "--device", "cuda",
                                      "--steps",  "1",
                                      "--text",   std::string(ZERO_SOURCE_DIR) + "/LICENSE"};
const std::vector<std::string> kStep{"bench", "step",     "--device", "cuda",    "--stages", "0",       "--recipes",
                                     "fp32",  "--rounds", "1",        "--steps", "1",        "--model", "gpt-1m"};

void expect_no_gpu(const std::vector<std::string>& command) {
  const auto ended = run(command);
  EXPECT_EQ(ended.code, 2) << ended.err;
  EXPECT_NE(ended.err.find("[--device] got cuda, but no GPU, or no CUDA driver (libcuda.so.1), on this machine"),
            std::string::npos)
      << ended.err;
}

TEST(DeviceOption, WithoutAGpuSaysSo) {
  if (has_driver()) GTEST_SKIP() << "this machine has a CUDA driver";
  expect_no_gpu(kTrain);
}

TEST(DeviceOption, BenchWithoutAGpuSaysSo) {
  if (has_driver()) GTEST_SKIP() << "this machine has a CUDA driver";
  expect_no_gpu(kStep);
}

// The tests' libcuda.so.1 reports two GPUs when they are counted, and implements nothing else.
TEST(DeviceOption, ADriverThatIsNoneIsAnErrorInWords) {
  if (has_driver()) GTEST_SKIP() << "this machine has a CUDA driver";
  const auto ended = run(kTrain, std::string(ZERO_BINARY_DIR) + "/tests/fake_cuda");
  EXPECT_EQ(ended.code, 2) << ended.err;
  EXPECT_NE(ended.err.find("[--device] got cuda, but "), std::string::npos) << ended.err;
  EXPECT_EQ(ended.err.find("no GPU, or"), std::string::npos) << ended.err;
  EXPECT_TRUE(ended.err.find("from the CUDA runtime") != std::string::npos ||
              ended.err.find("no plug-in at") != std::string::npos)
      << ended.err;
}

TEST(DeviceOption, OtherDevicesAreRefused) {
  const auto ended = run({"train", "--device", "tpu"});
  EXPECT_EQ(ended.code, 2) << ended.err;
  EXPECT_NE(ended.err.find("--device"), std::string::npos) << ended.err;
}

}  // namespace
}  // namespace zero::test::command_test
