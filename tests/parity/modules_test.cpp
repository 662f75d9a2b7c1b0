// Unmodified modules: every supported kind of module, at every stage, compared with a single-process
// loop that has one replica per rank.
#include <gtest/gtest.h>

#include "parity/training.h"

namespace zero::test::modules_test {
namespace {

class EveryModule : public ::testing::TestWithParam<std::string> {};

TEST_P(EveryModule, TrainsLikeASingleProcess) {
  Training setup;
  setup.problem = GetParam();
  setup.steps = 6;
  for (const int world : {1, 2}) {
    setup.world = world;
    setup.stage = 0;
    const auto plain = train_plain(setup);
    std::string hash;
    for (int stage = 0; stage <= 3; ++stage) {
      setup.stage = stage;
      const auto run = train_threads(setup);
      if (stage == 0) hash = run.hash;
      EXPECT_EQ(run.hash, hash) << "stage " << stage << " world " << world;
      ASSERT_EQ(run.losses.size(), plain.losses.size());
      for (std::size_t i = 0; i < run.losses.size(); ++i)
        EXPECT_NEAR(run.losses[i], plain.losses[i], 1e-5 * std::abs(plain.losses[i]))
            << "step " << i << " stage " << stage;
      ASSERT_EQ(run.norms.size(), plain.norms.size());
      for (std::size_t i = 0; i < run.norms.size(); ++i)
        EXPECT_NEAR(run.norms[i], plain.norms[i], 1e-5 * plain.norms[i]) << "step " << i << " stage " << stage;
      // Tails of libtorch's vectorised kernel round differently (a few ulps a step).
      EXPECT_LT(distance(run.masters, plain.masters), 2e-4) << "stage " << stage << " world " << world;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, EveryModule, ::testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const auto& p : problems()) names.push_back(p.name);
                           return names;
                         }()),
                         [](const auto& info) { return info.param; });

TEST(EveryModule, MoreRanksThanElements) {
  Training setup;
  setup.problem = "tiny";
  setup.world = 4;
  setup.steps = 5;
  const auto plain = train_plain(setup);
  for (int stage = 0; stage <= 3; ++stage) {
    setup.stage = stage;
    EXPECT_LT(distance(train_threads(setup).masters, plain.masters), 2e-4) << "stage " << stage;
  }
}

}  // namespace
}  // namespace zero::test::modules_test
