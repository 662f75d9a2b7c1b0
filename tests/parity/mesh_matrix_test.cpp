// One mesh, recipe and number of micro-batches gives one state, whatever the stage, the tiers of the states, the
// transport, the sizes of buckets and prefetches, and the delays of ranks. Every pair of two factors' values occurs in
// the cases, which are generated. Each state is also compared with a plain loop over one whole module.
#include <gtest/gtest.h>
#include <zero/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "parity/mesh_problems.h"
#include "support/folder.h"
#include "support/nightly.h"
#include "support/require.h"

namespace zero::test::mesh_matrix_test {
namespace {

using namespace zero::test::mesh;

// --- factors ------------------------------------------------------------------------------------

struct Grid {
  int t, u, d;
  int ranks() const { return t * u * d; }
};
constexpr std::array<Grid, 4> kGrids{{{2, 1, 2}, {1, 2, 2}, {2, 2, 1}, {3, 1, 2}}};  // 23 tokens do not divide by 3
constexpr std::array<const char*, 3> kRecipes{"fp32", "bf16", "fp16"};
constexpr std::array<int, 2> kAccumulations{1, 3};
constexpr std::array<const char*, 4> kTransports{"thread", "delayed", "shm", "gloo"};
// layout: where shards begin depends on these, and so does the hash of a state; on persistent parameters at stage 3
// only.
struct Sizes {
  const char *layout, *others;
  bool persistent = false;
};
constexpr std::array<Sizes, 3> kSizes{
    {{"", ""},
     {R"(, "reduce_bucket_size": 500, "stage3_param_persistence_threshold": 30)",
      R"(, "stage3_prefetch_bucket_size": 300, "stage3_max_live_parameters": 2000, "sub_group_size": 200)", true},
     {R"(, "reduce_bucket_size": 0)",
      R"(, "stage3_prefetch_bucket_size": 0, "overlap_comm": false, "contiguous_gradients": false)"}}};

struct Tier {
  const char* optimizer;   // device of masters and optimizer states
  const char* parameters;  // device of parameters
  bool late;               // the delayed update
  int least_stage;
};
constexpr std::array<Tier, 7> kTiers{{{"", "", false, 0},
                                      {"cpu", "", false, 1},
                                      {"nvme", "", false, 1},
                                      {"cpu", "", true, 1},
                                      {"nvme", "", true, 1},
                                      {"", "cpu", false, 3},
                                      {"nvme", "nvme", false, 3}}};
constexpr int kLateFrom = 2;

// The level of each factor.
enum Factor : std::uint8_t { kStage, kTier, kGrid, kRecipe, kAccumulation, kTransport, kSize, kFactors };
using Row = std::array<int, kFactors>;
constexpr Row kLevels{4, 7, 4, 3, 2, 4, 3};

bool allowed(int factor, int level, int other, int other_level) {
  if (factor > other) return allowed(other, other_level, factor, level);
  return factor != kStage || other != kTier || level >= kTiers[static_cast<std::size_t>(other_level)].least_stage;
}

// --- cases --------------------------------------------------------------------------------------

using Pair = std::array<int, 4>;  // a factor and its level, a later factor and its level

std::set<Pair> all_pairs() {
  std::set<Pair> pairs;
  for (int a = 0; a < kFactors; ++a)
    for (int b = a + 1; b < kFactors; ++b)
      for (int i = 0; i < kLevels[static_cast<std::size_t>(a)]; ++i)
        for (int j = 0; j < kLevels[static_cast<std::size_t>(b)]; ++j)
          if (allowed(a, i, b, j)) pairs.insert({a, i, b, j});
  return pairs;
}

// Begins with a pair that no row has yet, and gives each other factor the level that adds the most pairs.
std::vector<Row> generate() {
  auto missing = all_pairs();
  std::vector<Row> rows;
  while (!missing.empty()) {
    Row row;
    row.fill(-1);
    const auto [a, i, b, j] = *missing.begin();
    row[static_cast<std::size_t>(a)] = i, row[static_cast<std::size_t>(b)] = j;
    const auto level_of = [&](int factor) { return row[static_cast<std::size_t>(factor)]; };
    for (int factor = 0; factor < kFactors; ++factor) {
      if (level_of(factor) >= 0) continue;
      int best = -1, best_gain = -1;
      for (int k = 0; k < kLevels[static_cast<std::size_t>(factor)]; ++k) {
        // Levels take turns where they gain equally.
        const int level = (k + static_cast<int>(rows.size())) % kLevels[static_cast<std::size_t>(factor)];
        int gain = 0;
        for (int other = 0; other < kFactors && gain >= 0; ++other) {
          if (level_of(other) < 0) continue;
          if (!allowed(factor, level, other, level_of(other)))
            gain = -1;
          else if (missing.contains(factor < other ? Pair{factor, level, other, level_of(other)}
                                                   : Pair{other, level_of(other), factor, level}))
            ++gain;
        }
        if (gain > best_gain) best = level, best_gain = gain;
      }
      row[static_cast<std::size_t>(factor)] = best;
    }
    for (int x = 0; x < kFactors; ++x)
      for (int y = x + 1; y < kFactors; ++y) missing.erase({x, level_of(x), y, level_of(y)});
    rows.push_back(row);
  }
  return rows;
}

// --- one case -----------------------------------------------------------------------------------

Case case_of(const Row& row, const std::string& folder, bool plain = false) {
  const auto& tier = kTiers[static_cast<std::size_t>(row[kTier])];
  const auto& grid = kGrids[static_cast<std::size_t>(row[kGrid])];
  Case c{.model = &gpt_model(), .t = grid.t, .u = grid.u, .stage = row[kStage]};
  c.recipe = kRecipes[static_cast<std::size_t>(row[kRecipe])];
  c.accumulation = kAccumulations[static_cast<std::size_t>(row[kAccumulation])];
  c.steps = 6;
  // The scale grows to an overflow in the middle of the run.
  if (c.recipe == "fp16") c.recipe_keys = R"(, "initial_scale_power": 19, "loss_scale_window": 2, "hysteresis": 1)";
  const auto& sizes = kSizes[static_cast<std::size_t>(row[kSize])];
  c.zero = std::string(sizes.layout) + (plain ? "" : sizes.others);
  for (const auto& [key, device] :
       {std::pair{"offload_optimizer", tier.optimizer}, std::pair{"offload_param", tier.parameters}})
    if (*device)
      c.zero += std::string(", \"") + key + R"(": {"device": ")" + device + R"(", "nvme_path": ")" + folder + "\"}";
  if (tier.late) {
    c.late_from = kLateFrom;
    c.zero += R"(, "delayed_update": {"enabled": true, "start_step": )" + std::to_string(kLateFrom) + "}";
  }
  return c;
}

// The row whose state is the same: the stage, the tiers and the transport change nothing, but late updates do. With
// accumulation, stages 0 and 1 sum micro-batches before ranks, stages 2 and 3 after.
Row plain_of(const Row& row) {
  const bool late = kTiers[static_cast<std::size_t>(row[kTier])].late, accumulates = row[kAccumulation] > 0;
  Row plain = row;
  plain[kTransport] = 0;
  plain[kTier] = late ? 3 : 0;
  if (row[kStage] < 3 || !kSizes[static_cast<std::size_t>(row[kSize])].persistent)
    plain[kStage] = accumulates && row[kStage] >= 2 ? 2 : late ? 1 : 0;
  return plain;
}

std::string text_of(const Row& row) {
  std::string text;
  for (const int level : row) text += std::to_string(level);
  return text;
}

TEST(MeshMatrixCases, EveryPairOfLevelsOccurs) {
  const auto rows = generate();
  for (const auto& [a, i, b, j] : all_pairs())
    EXPECT_TRUE(std::any_of(
        rows.begin(), rows.end(),
        [&](const Row& row) { return row[static_cast<std::size_t>(a)] == i && row[static_cast<std::size_t>(b)] == j; }))
        << "level " << i << " of factor " << a << " with level " << j << " of factor " << b;
  for (const auto& row : rows) EXPECT_TRUE(allowed(kStage, row[kStage], kTier, row[kTier])) << text_of(row);
  EXPECT_LT(rows.size(), 40U);
}

// The plain states of one mesh, which are those of one whole module; by the text of their row.
void write_plain_states(const Grid& grid, const std::set<Row>& plain, const std::string& folder) {
  expect_passed({"thread", grid.ranks()}, [&](const auto& comm) {
    OneIn part(3);
    for (const auto& row : plain) {
      if (!part.take()) continue;
      const auto c = case_of(row, folder, /*plain=*/true);
      const auto got = train(c, comm);
      require((c.recipe == "fp16") != got.skipped.empty() && got.skipped.size() <= 3,
              text_of(row) + ": " + std::to_string(got.skipped.size()) + " steps skipped");
      compare(got, train_by_hand(c, grid.d, comm->rank() / grid.t / grid.u, got.skipped), c, *comm);
      if (comm->rank() == 0)
        std::ofstream(folder + "/states", std::ios::app) << text_of(row) << " " << got.hash << "\n";
    }
  });
}

class MeshMatrix : public testing::TestWithParam<int> {};

TEST_P(MeshMatrix, OneState) {
  const auto& grid = kGrids[static_cast<std::size_t>(GetParam())];
  const TempFolder temporary;
  const auto folder = temporary.text();
  auto rows = generate();
  std::erase_if(rows, [&](const Row& row) { return row[kGrid] != GetParam(); });
  std::set<Row> plain;
  for (const auto& row : rows) plain.insert(plain_of(row));
  write_plain_states(grid, plain, folder);
  std::ifstream file(folder + "/states");
  std::map<std::string, std::string> states;
  for (std::string row, hash; file >> row >> hash;) states[row] = hash;
  ASSERT_EQ(states.size(), nightly() ? plain.size() : (plain.size() + 2) / 3);
  for (int transport = 0; transport < kLevels[kTransport]; ++transport)
    expect_passed({kTransports[static_cast<std::size_t>(transport)], grid.ranks()}, [&](const auto& comm) {
      for (const auto& row : rows) {
        if (row[kTransport] != transport || !states.contains(text_of(plain_of(row)))) continue;
        const auto c = case_of(row, folder);
        const auto hash = train(c, comm).hash;
        require(hash == states.at(text_of(plain_of(row))), "another state at stage " + std::to_string(c.stage) + ", " +
                                                               kRecipes[static_cast<std::size_t>(row[kRecipe])] + ", " +
                                                               std::to_string(c.accumulation) + " micro-batches" +
                                                               c.zero);
      }
    });
}

INSTANTIATE_TEST_SUITE_P(All, MeshMatrix, testing::Range(0, static_cast<int>(kGrids.size())), [](const auto& info) {
  const auto& grid = kGrids[static_cast<std::size_t>(info.param)];
  return "t" + std::to_string(grid.t) + "_u" + std::to_string(grid.u) + "_d" + std::to_string(grid.d);
});

}  // namespace
}  // namespace zero::test::mesh_matrix_test
