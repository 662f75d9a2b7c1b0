// A fault at every call of the file system, each in a process of its own, because some faults end it.
#pragma once
#include <sys/wait.h>

#include <functional>
#include <string>

#include "support/descriptors.h"
#include "support/folder.h"
#include "unit/formats/checkpoint_faults.h"
#include "unit/formats/checkpoint_samples.h"

namespace zero::test {

// For k = 1, 1 + stride, ... until no call is struck: prepare(folder), then act(files, folder, k) in a child with a
// fault at its k-th call, then check(folder, label). The child must be killed, or fail or continue without an open
// descriptor left over. Returns the number of calls, or up to stride - 1 more.
inline int strike_every_call(FaultyFiles::Fault fault, int error, const std::function<void(const TempFolder&)>& prepare,
                             const std::function<void(FaultyFiles&, const TempFolder&, int)>& act,
                             const std::function<void(const TempFolder&, const std::string&)>& check, int stride = 1) {
  constexpr int kStruck = 40, kLeftOpen = 50;
  for (int k = 1;; k += stride) {
    const TempFolder folder(TempFolder::On::Memory);
    prepare(folder);
    const auto label = "fault " + std::to_string(static_cast<int>(fault)) + " at call " + std::to_string(k);
    const auto child = ::fork();
    if (child == 0) {
      FaultyFiles files(fault, k, error);
      const auto before = open_descriptors();
      const int code = code_of([&] { act(files, folder, k); });
      ::_exit(open_descriptors() != before ? kLeftOpen : files.struck() ? kStruck : code);
    }
    int status = 0;
    EXPECT_GT(child, 0);
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    check(folder, label);
    if ((WIFEXITED(status) && WEXITSTATUS(status) == 0) || ::testing::Test::HasFatalFailure()) return k - 1;
    EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == kStruck) << label << ": " << status;
    if (::testing::Test::HasFailure()) return k - 1;
  }
}

}  // namespace zero::test
