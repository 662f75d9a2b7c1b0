// script/skipped-cases on what GoogleTest itself writes: this program runs its samples, three of which are skipped.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <unistd.h>

#include "support/folder.h"

namespace skipped_cases_test {
namespace {

TEST(Samples, DISABLED_Passes) {}
TEST(Samples, DISABLED_NeedsAGpu) { GTEST_SKIP() << "no GPU here"; }
TEST(Samples, DISABLED_NeedsAGpuToo) { GTEST_SKIP() << "no GPU here"; }
TEST(Samples, DISABLED_SaysNothing) { GTEST_SKIP(); }

class SkippedCases : public ::testing::Test {
 protected:
  void run_samples(const std::string& name) const {
    const auto self = std::filesystem::read_symlink("/proc/self/exe").string();
    const auto command = "GTEST_OUTPUT=xml:" + (folder_ / (name + ".xml")).string() + " '" + self +
                         "' --gtest_also_run_disabled_tests '--gtest_filter=Samples.*' > /dev/null 2>&1";
    ASSERT_EQ(std::system(command.c_str()), 0);
  }
  // Its output; the exit code goes to `code`.
  std::string collect(int* code) const {
    const auto command = std::string(ZERO_SOURCE_DIR) + "/script/skipped-cases '" + folder_.string() + "' 2>/dev/null";
    std::string out;
    FILE* pipe = popen(command.c_str(), "r");
    char part[512];
    while (pipe && std::fgets(part, sizeof part, pipe)) out += part;
    *code = pipe ? WEXITSTATUS(pclose(pipe)) : -1;
    return out;
  }

  const zero::test::TempFolder temporary_;
  const std::filesystem::path& folder_ = temporary_.path();
};

TEST_F(SkippedCases, AreGroupedByReasonAndCounted) {
  run_samples("one_test");
  run_samples("other_test");
  int code = 0;
  EXPECT_EQ(collect(&code),
            "    4  no GPU here: one_test 2, other_test 2\n"
            "    2  no reason given: one_test 1, other_test 1\n"
            "8 cases in 2 programs, 6 skipped\n");
  EXPECT_EQ(code, 0);
}

TEST_F(SkippedCases, NothingSkippedIsSaidInOneLine) {
  int code = 0;
  EXPECT_EQ(collect(&code), "0 cases in 0 programs, 0 skipped\n");
  EXPECT_EQ(code, 0);
}

TEST_F(SkippedCases, AFileThatEndsInTheMiddleIsAnError) {
  run_samples("one_test");
  std::ofstream(folder_ / "torn_test.xml") << "<?xml version=\"1.0\"?><testsuites><testsuite";
  int code = 0;
  EXPECT_NE(collect(&code).find("4 cases in 1 programs, 3 skipped"), std::string::npos);
  EXPECT_EQ(code, 1);
}

}  // namespace
}  // namespace skipped_cases_test
