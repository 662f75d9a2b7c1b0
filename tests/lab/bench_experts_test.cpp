// `zero bench experts`: the bytes and the routing that it reports, against closed forms.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "support/process.h"
#include "support/require.h"

namespace zero::test::bench_experts_test {
namespace {

using nlohmann::json;
using Words = std::vector<std::string>;

constexpr double kLayers = 2, kHidden = 16, kTokens = 24, kExperts = 4;

Ended bench_experts(const Words& words) {
  Words all{ZERO_BINARY_DIR "/bin/zero", "bench", "experts", "--quiet"};
  for (const auto& [name, value] : std::initializer_list<std::pair<const char*, const char*>>{{"--layers", "2"},
                                                                                              {"--hidden", "16"},
                                                                                              {"--num-experts", "4"},
                                                                                              {"--tokens", "24"},
                                                                                              {"--steps", "3"},
                                                                                              {"--rounds", "1"},
                                                                                              {"--warmup", "1"}})
    all.insert(all.end(), {name, value});
  all.insert(all.end(), words.begin(), words.end());
  return run_to_end({all, {"COLUMNS=120", "OMP_NUM_THREADS=1", "RANK", "WORLD_SIZE"}, {}, -1}, 120);
}

json document(Words words) {
  words.emplace_back("--json");
  const auto run = bench_experts(words);
  EXPECT_EQ(run.code, 0) << run.err;
  return json::parse(run.out, nullptr, false);
}

// Every token chooses every expert and none is dropped: half of the rows belong to experts of the other rank.
TEST(BenchExperts, BytesOfTokensThatChooseAll) {
  for (const std::string transport : {"shm", "gloo"}) {
    const auto found = document({"--top-k", "4", "--no-drop", "--stages", "1,3", "--transport", transport});
    ASSERT_EQ(found["runs"].size(), 8u) << found;
    EXPECT_TRUE(found["equal_losses"]);
    for (const auto& run : found["runs"]) {
      const double element = run["recipe"] == "bf16" ? 2 : 4, ranks = 2;
      const double rows = kTokens * kExperts / 2, counts = 8 * kExperts / 2;
      const double expected = run["ep"] == 1 ? 0 : ranks * kLayers * (4 * rows * kHidden * element + counts);
      EXPECT_EQ(run["exchanged_bytes_per_step"], expected) << run;
      EXPECT_EQ(run["formula_bytes_per_step"], expected) << run;
      EXPECT_EQ(run["dropped"], 0) << run;
      EXPECT_NEAR(run["load"], 1, 1e-9) << run;
      EXPECT_GT(run["bytes_sent_per_step"], run["exchanged_bytes_per_step"]) << run;
    }
  }
}

// The routing, and with two ranks the loss, are the same for every stage and degree.
TEST(BenchExperts, DegreesAndStagesDoTheSame) {
  const auto found = document({"--recipes", "fp32", "--stages", "0,1,2,3"});
  ASSERT_EQ(found["runs"].size(), 8u);
  const auto& first = found["runs"][0];
  for (const auto& run : found["runs"])
    for (const auto* field : {"last_loss", "dropped", "load"}) EXPECT_EQ(run[field], first[field]) << field << run;
  EXPECT_GT(first["dropped"], 0);
}

// With its logits higher by far, expert 0 is chosen by every token, and keeps its capacity, a quarter.
TEST(BenchExperts, SkewedRouting) {
  const auto found = document({"--recipes", "fp32", "--stages", "1", "--ep", "2", "--skew", "50"});
  const auto& run = found["runs"][0];
  EXPECT_NEAR(run["load"], kExperts, 1e-9);
  EXPECT_NEAR(run["dropped"], 0.75, 1e-9);
}

TEST(BenchExperts, Tables) {
  const auto run = bench_experts({"--stages", "1", "--recipes", "bf16", "--inner", "0", "--merged-batches"});
  ASSERT_EQ(run.code, 0) << run.err;
  for (const auto* text : {"2 layers of 4 experts (hidden 16, inner 0), k 1, 24 tokens a rank", "bf16, stage 1, ep 2",
                           "all-to-all/step", "equal", "max/mean load", "losses equal in all stages and rounds"})
    EXPECT_NE(run.out.find(text), std::string::npos) << text << "\n" << run.out;
  EXPECT_EQ(run.out.find("DIFFERENT"), std::string::npos) << run.out;
}

// The launcher's ranks measure; they start none of their own, and the first one prints.
TEST(BenchExperts, UnderALauncher) {
  const Words words{ZERO_BINARY_DIR "/bin/zero",
                    "run",
                    "-n",
                    "2",
                    "--quiet",
                    "--no-prefix",
                    ZERO_BINARY_DIR "/bin/zero",
                    "bench",
                    "experts",
                    "--quiet",
                    "--hidden",
                    "16",
                    "--tokens",
                    "24",
                    "--steps",
                    "3",
                    "--warmup",
                    "1",
                    "--rounds",
                    "1",
                    "--stages",
                    "1",
                    "--ep",
                    "2",
                    "--recipes",
                    "fp32",
                    "--json"};
  const auto run = run_to_end({words, {"OMP_NUM_THREADS=1", "RANK", "WORLD_SIZE"}, {}, -1}, 120);
  ASSERT_EQ(run.code, 0) << run.err;
  const auto found = json::parse(run.out, nullptr, false);
  ASSERT_TRUE(found.is_object()) << run.out;
  EXPECT_EQ(found["world"], 2);
  EXPECT_EQ(found["runs"][0]["exchanged_bytes_per_step"], found["runs"][0]["formula_bytes_per_step"]);
  const auto refused = run_to_end({words + Words{"--world", "4"}, {"RANK", "WORLD_SIZE"}, {}, -1}, 120);
  EXPECT_EQ(refused.code, 2);
  EXPECT_NE(refused.err.find("[--world] got 4, expected 2, the ranks the launcher started"), std::string::npos)
      << refused.err;
}

TEST(BenchExperts, WrongOptions) {
  const auto refused = [](const Words& words, const std::string& text) {
    const auto run = bench_experts(words);
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_NE(run.err.find(text), std::string::npos) << run.err;
    EXPECT_EQ(run.out, "");
  };
  refused(
      {"--ep", "1,3", "--top-k", "5"},
      "these options do not fit together:\n  --top-k: got 5, expected at most --num-experts 4\n  --ep-world-size: got "
      "3, expected a divisor of 2 ranks and of 4 experts");
  refused({"--ep", "0"}, "[--ep-world-size] got \"0\", expected whole numbers of at least 1 with commas between");
  refused({"--ep", "1,"}, "[--ep-world-size] got \"1,\"");
  refused({"--stages", "4"}, "--stages");
  refused({"--recipes", "fp16"}, "--recipes");
}

}  // namespace
}  // namespace zero::test::bench_experts_test
