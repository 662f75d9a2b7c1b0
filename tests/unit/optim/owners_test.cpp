// The deal of whole parameters to ranks.
#include "optim/owners.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace zero::optim::owners_test {
namespace {

using Owned = std::vector<std::vector<int>>;

TEST(Owners, TheLargestGoFirstToTheShareWithTheLeast) {
  EXPECT_EQ(deal_owners({{1, 5, 3, 4}}, 2), (Owned{{1, 1, 0, 0}}));
  EXPECT_EQ(deal_owners({{2, 2, 2, 2}}, 3), (Owned{{0, 1, 2, 0}}));
  EXPECT_EQ(deal_owners({{7, 1}}, 1), (Owned{{0, 0}}));
  EXPECT_EQ(deal_owners({{}, {1}}, 4), (Owned{{}, {0}}));
}

// A block of a GPT is dealt as evenly as its matrices allow, and the next block the other way around.
TEST(Owners, EachUnitIsBalancedAndTheLargestShareGoesToWhoHasTheLeast) {
  const std::vector<double> block{3, 1, 4, 4};
  EXPECT_EQ(deal_owners({block, block, {1, 1}}, 2), (Owned{{0, 1, 0, 1}, {1, 0, 1, 0}, {0, 1}}));
  EXPECT_EQ(deal_owners({{5}, {5}, {5}}, 4), (Owned{{0}, {1}, {2}}));
}

TEST(Owners, NoRankHasMoreThanTheMeanAndTheLargest) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::vector<double>> units(random() % 9 + 1);
    double all = 0, largest = 0;
    for (auto& costs : units)
      for (auto count = random() % 7; count > 0; --count) {
        costs.push_back(static_cast<double>(random() % 1000));
        all += costs.back(), largest = std::max(largest, costs.back());
      }
    const int ranks = static_cast<int>(random() % 8) + 1;
    const auto owners = deal_owners(units, ranks);
    ASSERT_EQ(owners.size(), units.size());
    std::vector<double> sums(static_cast<std::size_t>(ranks), 0);
    for (std::size_t u = 0; u < units.size(); ++u) {
      ASSERT_EQ(owners[u].size(), units[u].size());
      for (std::size_t i = 0; i < units[u].size(); ++i) sums[static_cast<std::size_t>(owners[u][i])] += units[u][i];
    }
    EXPECT_LE(*std::max_element(sums.begin(), sums.end()), all / ranks + largest);
  }
}

}  // namespace
}  // namespace zero::optim::owners_test
