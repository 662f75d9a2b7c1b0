// Hang detection of `zero run`: a rank that computes is not a hang.
#include <gtest/gtest.h>

#include "support/process.h"

namespace zero::test::hang_test {
namespace {

TEST(Hang, IsNoLongEvaluationOfAModelOfOneUnit) {
  for (const char* stage : {"0", "3"}) {
    Process run({ZERO_BINARY_DIR "/bin/zero", "run", "--hang-timeout", "3", "-n", "2",
                 ZERO_BINARY_DIR "/tests/evaluating_program", "8", stage});
    EXPECT_EQ(run.wait(60), 0) << "stage " << stage << ": " << run.err;
    EXPECT_NE(run.out.find("evaluated"), std::string::npos) << run.out;
  }
}

}  // namespace
}  // namespace zero::test::hang_test
