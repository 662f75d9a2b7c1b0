// Division into units, compared with results derived by hand.
#include "sharding/unit_cut.h"

#include <gtest/gtest.h>

namespace zero::sharding::unit_cut_test {
namespace {

using Names = std::vector<std::string>;
using Parts = std::vector<std::vector<std::size_t>>;

Names names_of(const std::vector<Unit>& units) {
  Names names;
  for (const auto& unit : units) names.push_back(unit.name);
  return names;
}

Parts parts_of(const std::vector<Unit>& units) {
  Parts parts;
  for (const auto& unit : units) parts.push_back(unit.parameters);
  return parts;
}

TEST(UnitCut, ByModuleTheRootFirst) {
  const auto units = cut_units({{10, "b"}, {20, ""}, {30, "a"}, {40, "b"}, {50, ""}}, {});
  EXPECT_EQ(names_of(units), (Names{"root", "b", "a"}));
  EXPECT_EQ(parts_of(units), (Parts{{1, 4}, {0, 3}, {2}}));
  EXPECT_TRUE(units[0].root);
  EXPECT_FALSE(units[1].root);
}

TEST(UnitCut, FrozenOnesAreAUnitOfTheirOwn) {
  const auto units = cut_units({{1, "a"}, {2, "a", false}, {3, "a"}, {4, "b", false}}, {});
  EXPECT_EQ(names_of(units), (Names{"a", "a (frozen)", "b (frozen)"}));
  EXPECT_EQ(parts_of(units), (Parts{{0, 2}, {1}, {3}}));
  EXPECT_TRUE(units[0].trainable);
  EXPECT_FALSE(units[1].trainable);
}

TEST(UnitCut, ThoseThatStayFp32AreAUnitOfTheirOwn) {
  const auto units = cut_units(
      {{1, ""}, {2, "", true, 0, true}, {3, "a"}, {4, "a", true, 0, true}, {5, "a", false, 0, true}, {6, "b"}},
      {.persistent_numel = 1, .persistent_total = 9});
  EXPECT_EQ(names_of(units), (Names{"root (fp32)", "a", "a (fp32)", "a (frozen, fp32)", "b", "persistent"}));
  EXPECT_EQ(parts_of(units), (Parts{{1}, {2}, {3}, {4}, {5}, {0}}));
  for (const auto& unit : units) EXPECT_EQ(unit.fp32, unit.name.find("fp32") != std::string::npos) << unit.name;
  EXPECT_TRUE(units[0].root);
  EXPECT_FALSE(units[3].trainable);
}

TEST(UnitCut, EachKindOfUpdateIsAUnitOfItsOwn) {
  const UnitMember matrix{.numel = 5, .unit = "a", .kind = "Muon"};
  auto frozen = matrix;
  frozen.trainable = false;
  const auto units = cut_units({{1, ""}, {2, "a"}, matrix, {4, "a"}, frozen, {3, "b"}}, {});
  EXPECT_EQ(names_of(units), (Names{"root", "a", "a (Muon)", "a (Muon, frozen)", "b"}));
  EXPECT_EQ(parts_of(units), (Parts{{0}, {1, 3}, {2}, {4}, {5}}));
}

// What operators of one module read in turn; not the parts of a module that is too large to be gathered at once.
TEST(UnitCut, UnitsOfOneModuleHaveItsNumber) {
  const auto modules = [](const UnitRules& rules) {
    std::vector<int> numbers;
    for (const auto& unit : cut_units({{1, ""}, {2, "", false}, {3, "a"}, {4, "a", false}, {5, "b"}}, rules))
      numbers.push_back(unit.module);
    return numbers;
  };
  const auto all = modules({});  // root, root (frozen), a, a (frozen), b
  ASSERT_EQ(all.size(), 5u);
  EXPECT_EQ(all[0], -1);
  EXPECT_EQ(all[1], -1);
  EXPECT_GE(all[2], 0);
  EXPECT_EQ(all[3], all[2]);
  EXPECT_EQ(all[4], -1);
  std::vector<UnitMember> members{{3, "a"}, {3, "a"}, {4, "a", false}};
  for (const auto& unit : cut_units(members, {.max_numel = 4})) EXPECT_EQ(unit.module, -1) << unit.name;
}

// A unit has at most max_numel elements, except for a single parameter that is larger.
TEST(UnitCut, NoPartExceedsTheMost) {
  const auto parts = [](const std::vector<std::int64_t>& numels, std::int64_t most) {
    std::vector<UnitMember> members;
    for (const auto numel : numels) members.push_back({numel, "a"});
    return parts_of(cut_units(members, {.max_numel = most}));
  };
  EXPECT_EQ(parts({4, 4, 4}, 8), (Parts{{0, 1}, {2}}));
  EXPECT_EQ(parts({4, 4, 4}, 7), (Parts{{0}, {1}, {2}}));
  EXPECT_EQ(parts({4, 4, 4}, 12), (Parts{{0, 1, 2}}));
  EXPECT_EQ(parts({3, 9, 3, 5}, 8), (Parts{{0}, {1}, {2, 3}}));
  EXPECT_EQ(parts({9, 9}, 8), (Parts{{0}, {1}}));
  const auto units = cut_units({{4, "a"}, {4, "a"}, {4, "a"}}, {.max_numel = 4});
  EXPECT_EQ(names_of(units), (Names{"a", "a/2", "a/3"}));
}

TEST(UnitCut, SmallNeighboursAreMerged) {
  const auto units = cut_units({{1, ""}, {2, "a"}, {3, "b"}, {9, "c"}, {1, "d"}}, {.min_numel = 5});
  EXPECT_EQ(names_of(units), (Names{"root", "a+b", "c", "d"}));
  EXPECT_EQ(parts_of(units), (Parts{{0}, {1, 2}, {3}, {4}}));
}

TEST(UnitCut, SmallParametersStayUntilTheirSumIsReached) {
  const auto units =
      cut_units({{10, "a"}, {2, "a"}, {3, "b"}, {2, "b"}, {1, "b"}}, {.persistent_numel = 3, .persistent_total = 6});
  EXPECT_EQ(names_of(units), (Names{"a", "b", "persistent"}));
  EXPECT_EQ(parts_of(units), (Parts{{0}, {3}, {1, 2, 4}}));
  EXPECT_TRUE(units[2].persistent && units[2].root);
  EXPECT_FALSE(units[0].persistent);
}

}  // namespace
}  // namespace zero::sharding::unit_cut_test
