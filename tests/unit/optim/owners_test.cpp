// The deal of whole parameters to ranks.
#include "optim/owners.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace zero::optim::owners_test {
namespace {

TEST(Owners, TheLargestGoFirstToTheRankWithTheLeast) {
  EXPECT_EQ(deal_owners({1, 5, 3, 4}, 2), (std::vector<int>{0, 0, 1, 1}));
  EXPECT_EQ(deal_owners({2, 2, 2, 2}, 3), (std::vector<int>{0, 1, 2, 0}));
  EXPECT_EQ(deal_owners({7, 1}, 1), (std::vector<int>{0, 0}));
  EXPECT_TRUE(deal_owners({}, 4).empty());
}

TEST(Owners, NoRankHasMoreThanTheMeanAndTheLargest) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<double> costs(random() % 40 + 1);
    for (auto& cost : costs) cost = static_cast<double>(random() % 1000);
    const int ranks = static_cast<int>(random() % 8) + 1;
    const auto owners = deal_owners(costs, ranks);
    std::vector<double> sums(static_cast<std::size_t>(ranks), 0);
    for (std::size_t i = 0; i < costs.size(); ++i) sums[static_cast<std::size_t>(owners[i])] += costs[i];
    const double mean = std::accumulate(costs.begin(), costs.end(), 0.0) / ranks;
    EXPECT_LE(*std::max_element(sums.begin(), sums.end()), mean + *std::max_element(costs.begin(), costs.end()));
  }
}

}  // namespace
}  // namespace zero::optim::owners_test
