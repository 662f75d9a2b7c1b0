// Loads of experts: their figures, the lines of experts.jsonl, and sums of neighbours.
#include <gtest/gtest.h>
#include <zero/errors.h>

#include <fstream>

#include "support/folder.h"
#include "tools/report/page/expert_load.h"

namespace zero::report::expert_load_test {
namespace {

ExpertLoad load_of(std::int64_t first, std::int64_t last, std::vector<std::int64_t> counts, std::int64_t kept) {
  return {first, last, {{1, std::move(counts), kept}, {3, {5, 5, 5, 5}, 20}}};
}

TEST(ExpertLoad, Figures) {
  const auto load = load_of(1, 1, {12, 4, 0, 4}, 15);
  EXPECT_EQ(load.layers[0].sum(), 20);
  EXPECT_DOUBLE_EQ(load.layers[0].max_over_mean(), 2.4);
  EXPECT_DOUBLE_EQ(load.layers[0].min_over_mean(), 0);
  EXPECT_DOUBLE_EQ(load.layers[0].dropped(), 0.25);
  EXPECT_DOUBLE_EQ(load.layers[1].max_over_mean(), 1);
  EXPECT_DOUBLE_EQ(load.max_over_mean(), 2.4);
  EXPECT_DOUBLE_EQ(load.dropped(), 0.125);
  const LayerLoad none{0, {0, 0}, 0};
  EXPECT_DOUBLE_EQ(none.max_over_mean(), 1);
  EXPECT_DOUBLE_EQ(none.dropped(), 0);
}

TEST(ExpertLoad, LinesOfARunAreFew) {
  EXPECT_EQ(steps_of_load_line(1), 1);
  EXPECT_EQ(steps_of_load_line(200), 1);
  EXPECT_EQ(steps_of_load_line(201), 2);
  EXPECT_EQ(steps_of_load_line(100000), 500);
  for (const std::int64_t steps : {1, 150, 399, 12345})
    EXPECT_LE((steps + steps_of_load_line(steps) - 1) / steps_of_load_line(steps), kMostLoadLines);
}

TEST(ExpertLoad, ReadsWhatItWrote) {
  const test::TempFolder folder;
  const auto path = folder.path() / "experts.jsonl";
  EXPECT_TRUE(read_loads(path).empty()) << "no file";
  {
    std::ofstream out(path);
    out << load_json(load_of(1, 10, {1, 2, 3, 4}, 9)) << "\n"
        << load_json(load_of(11, 20, {4, 3, 2, 1}, 8)) << "\n"
        << load_json(load_of(21, 30, {9, 9, 9, 9}, 8))
        << "\n"
        // resumed from step 20
        << load_json(load_of(21, 22, {2, 2, 2, 2}, 8)) << "\n"
        << R"({"first": 23, "la)";
  }
  const auto loads = read_loads(path);
  ASSERT_EQ(loads.size(), 3u);
  EXPECT_EQ(loads[1].first, 11);
  EXPECT_EQ(loads[1].layers[0].counts, (std::vector<std::int64_t>{4, 3, 2, 1}));
  EXPECT_EQ(loads[1].layers[0].block, 1);
  EXPECT_EQ(loads[2].last, 22);
  EXPECT_EQ(loads[2].layers[0].kept, 8);
  const auto sums = joined(loads, 2);
  ASSERT_EQ(sums.size(), 2u);
  EXPECT_EQ(sums[0].first, 1);
  EXPECT_EQ(sums[0].last, 20);
  EXPECT_EQ(sums[0].layers[0].counts, (std::vector<std::int64_t>{5, 5, 5, 5}));
  EXPECT_EQ(sums[0].layers[0].kept, 17);
  EXPECT_EQ(sums[1].last, 22);
  EXPECT_EQ(joined(loads, 10).size(), 3u);
}

TEST(ExpertLoad, DamagedLines) {
  for (const char* line :
       {"{}", "[1]", R"({"first": 1, "last": 0, "layers": [{"block": 1, "counts": [1], "kept": 1}]})",
        R"({"first": 1, "last": 1, "layers": [{"block": 1, "counts": [1], "kept": 2}]})",
        R"({"first": 1, "last": 1, "layers": [{"block": 1, "counts": [-1, 2], "kept": 1}]})",
        R"({"first": 1, "last": 1, "layers": []})"}) {
    const test::TempFolder folder;
    const auto path = folder.path() / "experts.jsonl";
    std::ofstream(path) << line << "\n";
    try {
      (void)read_loads(path);
      ADD_FAILURE() << line;
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find("experts.jsonl:1:"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace zero::report::expert_load_test
