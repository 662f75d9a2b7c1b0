// `--device cuda` as a user meets it without a GPU, or with a driver that promises more than there is: exit code 2, and
// the first thing that is missing by name.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/process.h"

namespace zero::test {
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

TEST(DeviceOption, WithoutAGpuSaysSo) {
  if (has_driver()) GTEST_SKIP() << "this machine has a CUDA driver";
  for (const auto& command : {kTrain, kStep}) {
    const auto ended = run(command);
    EXPECT_EQ(ended.code, 2) << ended.err;
    EXPECT_NE(ended.err.find("[--device] got cuda, but no GPU, or no CUDA driver (libcuda.so.1), on this machine"),
              std::string::npos)
        << ended.err;
  }
}

// The tests' own libcuda.so.1 shows two GPUs to those who count, and has nothing else of a driver.
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
}  // namespace zero::test
