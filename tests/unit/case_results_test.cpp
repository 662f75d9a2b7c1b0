// script/case-results and script/reliability on what GoogleTest itself writes: this program runs its samples, of which
// some are skipped and two fail.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include <unistd.h>

#include "support/folder.h"

namespace case_results_test {
namespace {

TEST(Samples, DISABLED_Passes) {}
TEST(Samples, DISABLED_NeedsAGpu) { GTEST_SKIP() << "no GPU here"; }
TEST(Samples, DISABLED_NeedsAGpuToo) { GTEST_SKIP() << "no GPU here"; }
TEST(Samples, DISABLED_SaysNothing) { GTEST_SKIP(); }
TEST(Idle, DISABLED_NeedsAGpu) { GTEST_SKIP() << "no GPU here"; }
TEST(Idle, DISABLED_NeedsAGpuToo) { GTEST_SKIP() << "no GPU here"; }
TEST(Failures, DISABLED_OneLine) { ADD_FAILURE() << "the sum is wrong"; }
TEST(Failures, DISABLED_ManyLines) {
  std::string lines;
  for (int line = 1; line <= 20; ++line) lines += "line " + std::to_string(line) + "\n";
  ADD_FAILURE() << lines;
}

class CaseResults : public ::testing::Test {
 protected:
  void run_samples(const std::string& name, const std::string& suite = "Samples", bool passes = true) const {
    const auto self = std::filesystem::read_symlink("/proc/self/exe").string();
    const auto command = "GTEST_OUTPUT=xml:" + (folder_ / (name + ".xml")).string() + " '" + self +
                         "' --gtest_also_run_disabled_tests '--gtest_filter=" + suite + ".*' > /dev/null 2>&1";
    ASSERT_EQ(std::system(command.c_str()) == 0, passes);
  }
  // Its output; the exit code goes to `code`.
  std::string collect(int* code) const {
    const auto command = std::string(ZERO_SOURCE_DIR) + "/script/case-results '" + folder_.string() + "' 2>/dev/null";
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

TEST_F(CaseResults, AreGroupedByReasonAndCounted) {
  run_samples("one_test");
  run_samples("other_test");
  int code = 0;
  EXPECT_EQ(collect(&code),
            "    4  no GPU here: one_test 2, other_test 2\n"
            "    2  no reason given: one_test 1, other_test 1\n"
            "8 cases in 2 programs, 6 skipped\n");
  EXPECT_EQ(code, 0);
}

TEST_F(CaseResults, FailuresComeFirstEachWithTheBeginningOfItsMessage) {
  run_samples("broken_test", "Failures", false);
  int code = 0;
  const auto out = collect(&code);
  EXPECT_NE(out.find("failed: broken_test: Failures.DISABLED_OneLine\n"), std::string::npos) << out;
  EXPECT_NE(out.find("         the sum is wrong\n"), std::string::npos) << out;
  EXPECT_NE(out.find("failed: broken_test: Failures.DISABLED_ManyLines\n"), std::string::npos) << out;
  EXPECT_NE(out.find("         line 9\n"), std::string::npos) << out;
  EXPECT_EQ(out.find("line 20"), std::string::npos) << out;
  EXPECT_NE(out.find(" more lines\n2 cases in 1 programs, 0 skipped\n"), std::string::npos) << out;
  EXPECT_EQ(code, 0);
}

TEST_F(CaseResults, ASuiteOfSkippedCasesIsAWarning) {
  run_samples("one_test");
  run_samples("idle_test", "Idle");
  int code = 0;
  const auto out = collect(&code);
  EXPECT_NE(
      out.find("warning: all cases of these suites were skipped: idle_test: Idle\n6 cases in 2 programs, 5 skipped\n"),
      std::string::npos)
      << out;
}

// A build folder whose program of a claim is this one, with other suites.
TEST_F(CaseResults, AClaimWhoseSuiteIsSkippedIsNotShown) {
  const auto self = std::filesystem::read_symlink("/proc/self/exe").string();
  std::filesystem::create_directories(folder_ / "tests");
  const auto program = folder_ / "tests/tools_programs";
  for (const std::string suites : {"Samples.*", "Samples.*:Idle.*"}) {
    std::ofstream(program) << "#!/bin/sh\nexec '" << self
                           << "' --gtest_also_run_disabled_tests '--gtest_filter=" << suites << "'\n";
    std::filesystem::permissions(program, std::filesystem::perms::owner_all);
    const auto command = "BUILD_DIR='" + folder_.string() + "' " + ZERO_SOURCE_DIR + "/script/reliability S16 > '" +
                         (folder_ / "out").string() + "' 2>&1";
    const int code = WEXITSTATUS(std::system(command.c_str()));
    std::stringstream out;
    out << std::ifstream(folder_ / "out").rdbuf();
    EXPECT_EQ(code, suites == "Samples.*" ? 0 : 1) << out.str();
    EXPECT_EQ(out.str().find("all cases of Idle were skipped: no GPU here") != std::string::npos, code == 1)
        << out.str();
  }
}

TEST_F(CaseResults, NothingSkippedIsSaidInOneLine) {
  int code = 0;
  EXPECT_EQ(collect(&code), "0 cases in 0 programs, 0 skipped\n");
  EXPECT_EQ(code, 0);
}

TEST_F(CaseResults, AFileThatEndsInTheMiddleIsAnError) {
  run_samples("one_test");
  std::ofstream(folder_ / "torn_test.xml") << "<?xml version=\"1.0\"?><testsuites><testsuite";
  int code = 0;
  EXPECT_NE(collect(&code).find("4 cases in 1 programs, 3 skipped"), std::string::npos);
  EXPECT_EQ(code, 1);
}

}  // namespace
}  // namespace case_results_test
