// `zero train --moe`: equal losses for all degrees and stages, evaluation, resuming, and the recorded load of experts.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/file_text.h"
#include "support/process.h"
#include "support/require.h"
#include "support/train_command.h"

namespace zero::test::train_experts_test {
namespace {

Words moe(int ep, const Words& more = {}) {
  return Words{"--moe", "--num-experts", "4", "--ep-world-size", std::to_string(ep)} + more;
}

std::vector<nlohmann::json> loads_of(const TrainedRun& run) {
  std::vector<nlohmann::json> all;
  std::ifstream in(run.folder + "/out/experts.jsonl");
  for (std::string line; std::getline(in, line);) all.push_back(nlohmann::json::parse(line));
  return all;
}

void expect_close(const TrainedRun& got, const TrainedRun& wanted, double tolerance) {
  ASSERT_EQ(got.code, 0) << got.err;
  ASSERT_EQ(got.losses.size(), wanted.losses.size());
  for (std::size_t i = 0; i < wanted.losses.size(); ++i)
    EXPECT_NEAR(got.losses[i], wanted.losses[i], tolerance) << "step " << i;
  EXPECT_NEAR(got.heldout, wanted.heldout, tolerance);
}

// How experts are divided, and the stage, change nothing but the rounding of experts' gradients.
TEST(TrainExperts, DegreesAndStagesLearnTheSame) {
  const auto wanted = train_command(4, moe(1, {"--stage", "0"}));
  ASSERT_EQ(wanted.code, 0) << wanted.err;
  ASSERT_EQ(wanted.losses.size(), 12u);
  EXPECT_LT(wanted.losses.back(), wanted.losses.front() - 0.5);
  EXPECT_NE(wanted.heldout, 0);
  const auto counts = loads_of(wanted);
  for (int stage = 0; stage <= 3; ++stage) {
    const int ep = stage == 1 ? 4 : 2;
    const auto got = train_command(4, moe(ep, {"--stage", std::to_string(stage)}));
    expect_close(got, wanted, 2e-4);
    if (got.code == 0) EXPECT_EQ(loads_of(got).front(), counts.front()) << "the first step has the same routing";
  }
}

TEST(TrainExperts, OneRankTwoRanksAndVariants) {
  const auto one = train_command(1, moe(1, {"--top-k", "2", "--set", "libzero.model.experts.use_residual=true"}));
  ASSERT_EQ(one.code, 0) << one.err;
  EXPECT_LT(one.losses.back(), one.losses.front() - 0.5);
  EXPECT_FALSE(one.log.front().contains("expert_parallel_bytes_sent"));
  for (const std::string setting : {"activation_checkpointing.number_checkpoints=1", "gradient_accumulation_steps=2",
                                    "libzero.model.experts.drop_tokens=false", "libzero.model.dropout=0.1"})
    expect_close(train_command(2, moe(2, {"--set", setting})), train_command(2, moe(1, {"--set", setting})), 2e-4);
}

// Every choice of every token of all ranks, in one line for each step.
TEST(TrainExperts, LoadsAreRecorded) {
  const auto run = train_command(2,
                                 moe(2, {"--top-k", "2", "--set", "libzero.model.experts.expert_interval=1", "--set",
                                         "libzero.model.experts.capacity_factor=0.5"}),
                                 5);
  ASSERT_EQ(run.code, 0) << run.err;
  const auto loads = loads_of(run);
  ASSERT_EQ(loads.size(), 5u);
  for (std::size_t i = 0; i < loads.size(); ++i) {
    EXPECT_EQ(loads[i]["first"], i + 1);
    EXPECT_EQ(loads[i]["last"], i + 1);
    ASSERT_EQ(loads[i]["layers"].size(), 2u);
    double most = 0;
    std::int64_t choices = 0, kept = 0;
    for (const auto& layer : loads[i]["layers"]) {
      const auto counts = layer["counts"].get<std::vector<std::int64_t>>();
      ASSERT_EQ(counts.size(), 4u);
      std::int64_t sum = 0;
      for (const auto count : counts) sum += count, most = std::max(most, static_cast<double>(count));
      EXPECT_EQ(sum, 2 * 4 * 33 * 2) << "choices of 2 ranks, 4 samples, 33 tokens";
      choices += sum, kept += layer["kept"].get<std::int64_t>();
      EXPECT_LE(layer["kept"], 2 * 4 * 33) << "ceil(132 / 4 * 0.5 * 2) = 33 of each expert and rank";
    }
    EXPECT_NEAR(run.log[i]["load_max"].get<double>(), most / 132, 1e-6);
    EXPECT_NEAR(run.log[i]["dropped"].get<double>(), 1 - static_cast<double>(kept) / static_cast<double>(choices),
                1e-6);
    EXPECT_GE(run.log[i]["aux_loss"].get<double>(), 1.9) << "1 for each of two layers where experts are chosen evenly";
  }
  EXPECT_EQ(run.result["experts"]["steps"], (std::vector<int>{5, 5}));
  EXPECT_TRUE(contains(run.out, "experts, steps 5 to 5")) << run.out;
  EXPECT_EQ(run.record["mesh"]["ep"], 2);
  EXPECT_GT(run.log.back()["expert_parallel_bytes_sent"], 0);
}

TEST(TrainExperts, ResumesOnOtherDegrees) {
  const auto whole = train_command(2, moe(1, {"--checkpoint-dir", "saved", "--save-every", "4"}), 8);
  ASSERT_EQ(whole.code, 0) << whole.err;
  const auto again =
      train_command(2, moe(2, {"--checkpoint-dir", "saved", "--resume", "global_step4"}), 8, whole.folder);
  ASSERT_EQ(again.code, 0) << again.err;
  ASSERT_EQ(again.losses.size(), 12u) << "appended to the log";
  for (std::size_t step = 4; step < 8; ++step)
    EXPECT_NEAR(again.losses[step + 4], whole.losses[step], 2e-5) << "step " << step;
  const auto loads = loads_of(again);
  ASSERT_EQ(loads.size(), 12u);
  EXPECT_EQ(loads[8], loads[4]) << "the same tokens choose the same experts";
}

// With experts that all have more tokens than they take, the bytes sent are the plan's.
TEST(TrainExperts, BytesAreThePlans) {
  for (const int stage : {0, 1, 2, 3})
    for (const int ep : {2, 4}) {
      SCOPED_TRACE("stage " + std::to_string(stage) + ", ep " + std::to_string(ep));
      const auto run =
          train_command(4,
                        moe(ep, {"--stage", std::to_string(stage), "--set", "libzero.model.experts.capacity_factor=0.2",
                                 "--set", "libzero.model.experts.min_capacity=0"}),
                        3);
      ASSERT_EQ(run.code, 0) << run.err;
      const auto& recorded = run.record["recorded"];
      std::uint64_t zero = 0, expert = 0;
      for (const auto& row : recorded["traffic"]) {
        const auto operation = row["operation"].get<std::string>();
        if (operation != "control")
          (operation.starts_with("ep.") ? expert : zero) += row["bytes_sent"].get<std::uint64_t>();
      }
      EXPECT_EQ(recorded["planned"]["sent_bytes"]["zero"], zero);
      EXPECT_EQ(recorded["planned"]["sent_bytes"]["expert_parallel"], expert);
      EXPECT_GT(expert, 0u);
      EXPECT_EQ(run.log.back()["zero_bytes_sent"], zero);
      EXPECT_EQ(run.log.back()["expert_parallel_bytes_sent"], expert);
    }
}

TEST(TrainExperts, ReportShowsTheLoad) {
  const auto run = train_command(2, moe(2), 6);
  ASSERT_EQ(run.code, 0) << run.err;
  const auto report = [&](const Words& more) {
    return run_to_end({Words{ZERO_BINARY_DIR "/bin/zero", "report", run.folder + "/out", "--out", "r.html"} + more,
                       {},
                       run.folder,
                       -1},
                      60);
  };
  const auto text = report({});
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "block 1: the busiest has ")) << text.out;
  EXPECT_TRUE(contains(text.out, "expert parallelism ")) << text.out;
  const auto json = nlohmann::json::parse(report({"--json"}).out);
  const auto& loads = json["runs"][0]["experts"];
  ASSERT_EQ(loads.size(), 6u);
  EXPECT_EQ(loads[5]["layers"][0]["counts"], loads_of(run)[5]["layers"][0]["counts"]);
  const auto page = file_text(run.folder + "/r.html");
  EXPECT_TRUE(contains(page, "id=\"experts-0-1\""));
  EXPECT_TRUE(contains(page, "data-table=\"experts\""));
}

}  // namespace
}  // namespace zero::test::train_experts_test
