// What libzero relies on in libtorch is tried by itself, and what does not work is named.
#include <zero/torch_check.h>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/library.h>

#include <cstdlib>
#include <iostream>

namespace zero::test::torch_check_test {
namespace {

TEST(TorchCheck, EveryMechanismWorksAndTheGeneratorStays) {
  at::manual_seed(11);
  const auto wanted = at::rand({4});
  at::manual_seed(11);
  const auto checks = check_torch();
  EXPECT_TRUE(at::rand({4}).equal(wanted));
  ASSERT_EQ(checks.size(), 5u);
  for (const auto& check : checks) EXPECT_EQ(check.fault, "") << check.mechanism;
  const at::NoGradGuard no_grad;
  for (const auto& check : check_torch()) EXPECT_EQ(check.fault, "") << check.mechanism << " without gradients";
}

// In a process of its own: the registration is that of the process.
TEST(TorchCheckDeathTest, AMechanismThatFailsIsNamed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto with_a_key_taken = [] {
    torch::Library taken(torch::Library::IMPL, "_", c10::DispatchKey::TESTING_ONLY_GenericMode, __FILE__, __LINE__);
    taken.fallback(torch::CppFunction::makeFallthrough());  // operators skip what libzero registers
    for (const auto& check : check_torch()) std::cerr << check.mechanism << ": <" << check.fault << ">\n";
    std::_Exit(0);
  };
  EXPECT_EXIT(with_a_key_taken(), testing::ExitedWithCode(0),
              "hooks of gradients: <>\ndeferred initialization: <[^>]+>");
}

}  // namespace
}  // namespace zero::test::torch_check_test
