// Predicted times: profiles as JSON, the sum of a step's parts, the bound, and the fit of speeds.
#include <gtest/gtest.h>

#include <zero/errors.h>
#include <zero/plan.h>

#include <cmath>
#include <string>

#include "plan/nnls.h"

namespace zero::plan_time_test {
namespace {

Options options_of(const std::string& more = "") {
  return Options::from_json(R"({"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 2)" +
                            more + "}}");
}

TEST(PlanTime, IsTheSumOfWorkDividedBySpeeds) {
  PlanMachine machine;
  machine.gpu = false;
  machine.ranks_per_host = 2;
  auto& profile = machine.profile;
  profile.ranks = 2;
  profile.bf16 = {.flops = 1e9, .elements = 1e8, .heads = 1e6, .layer_s = 1e-3};
  profile.link_bytes = 1e8;
  profile.collective_s = 1e-4;
  profile.device_update_elements = 1e7;
  profile.step_s = 0.01;
  const auto model = PlanModel::named("gpt-1m");
  const auto one = plan(model, options_of(), machine);
  const auto& w = one.work;
  EXPECT_EQ(w.layers, 4);
  EXPECT_EQ(w.heads, 4.0 * 2 * 128 * 4);
  EXPECT_GT(w.collectives, 0);
  const double compute = w.flops / 1e9 + w.elements / 1e8 + w.heads / 1e6 + 4e-3;
  EXPECT_NEAR(one.time.compute, compute, 1e-12);
  const double network = static_cast<double>(one.traffic.sent()) / 1e8 + static_cast<double>(w.collectives) * 1e-4;
  EXPECT_NEAR(one.time.network, network, 1e-12);
  EXPECT_NEAR(one.time.step, compute + network + static_cast<double>(w.updated) / 1e7 + 0.01, 1e-12);
  EXPECT_EQ(one.time.bound, "compute");
  // Twice the ranks on the same cores.
  machine.ranks_per_host = 4;
  EXPECT_NEAR(plan(model, options_of(), machine).time.compute, 2 * compute, 1e-12);
  // A disk that is slower than everything else.
  machine.ranks_per_host = 2;
  profile.read_bytes = profile.write_bytes = 1e6;
  const auto away =
      plan(model, options_of(R"(, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"})"), machine);
  EXPECT_EQ(away.time.bound, "disk");
  EXPECT_NEAR(away.time.disk, 2 * static_cast<double>(away.traffic.read + away.traffic.written) / 1e6, 1e-9);
  EXPECT_EQ(away.work.updated, 0);
  EXPECT_EQ(away.work.updated_on_host, one.work.updated);
}

TEST(PlanTime, CountsRecomputationAndMicroBatches) {
  PlanMachine machine;
  const auto model = PlanModel::named("gpt2");
  const auto plain = plan(model, options_of(), machine).work;
  const auto again =
      plan(model, options_of(R"(}, "activation_checkpointing": {"number_checkpoints": 12)"), machine).work;
  // One additional forward of the layers, but not of the head.
  const double tokens = 2 * 1024, head = 6.0 * 50257 * 768 * tokens;
  EXPECT_NEAR((again.flops - head) / (plain.flops - head), 4.0 / 3, 1e-9);
  EXPECT_NEAR(plain.flops / (6.0 * 124439808 * tokens), 1, 0.1);  // 6 P a token, and attention
  EXPECT_EQ(again.layers, 16);
  const auto three = plan(model, options_of(R"(}, "gradient_accumulation_steps": 3, "aio": {)"), machine).work;
  EXPECT_NEAR(three.flops / plain.flops, 3, 1e-9);
}

// docs/memory.md, "bytes to other hosts": gathers (H-1)/N*S, sums (H-1)/H*S.
TEST(PlanTraffic, AcrossHosts) {
  PlanMachine machine;
  machine.gpu = false;
  machine.hosts = 3, machine.ranks_per_host = 2;
  const auto at = [&](int stage) {
    const auto options = options_of().with("zero_optimization.stage", std::to_string(stage), "test");
    return plan(PlanModel::named("gpt-1m"), options, machine).traffic;
  };
  for (const int stage : {1, 2, 3}) {
    const auto t = at(stage);
    const double gathered = static_cast<double>(t.gathered) * 6 / 5, reduced = static_cast<double>(t.reduced) * 6 / 5;
    EXPECT_NEAR(static_cast<double>(t.across_hosts), gathered * 2 / 6 + reduced * 2 / 3, 1) << stage;
  }
  // An all-reduce is a reduce-scatter and an all-gather.
  const auto whole = at(0);
  EXPECT_NEAR(static_cast<double>(whole.across_hosts),
              static_cast<double>(whole.reduced) * 6 / 5 * (2.0 / 3 + 2.0 / 6) / 2, 1);
  // GPUs use rings.
  machine.gpu = true;
  EXPECT_EQ(at(3).across_hosts, at(3).sent() / 2);
  machine.hosts = 1, machine.ranks_per_host = 6;
  EXPECT_EQ(at(3).across_hosts, 0);
}

TEST(PlanTime, WithoutSpeedsNothingIsPredicted) {
  const auto unknown = plan(PlanModel::named("gpt2"), options_of(), PlanMachine{});
  EXPECT_EQ(unknown.time.step, 0);
  EXPECT_EQ(unknown.time.bound, "");
}

TEST(PlanProfile, ReadsWhatItWrites) {
  PlanProfile profile;
  profile.name = "a machine";
  profile.ranks = 3;
  profile.bf16 = {.flops = 1e12, .elements = 2e9, .heads = 3e6, .layer_s = 4e-5};
  profile.read_bytes = 5e9;
  const auto read = PlanProfile::from_json(profile.json());
  EXPECT_EQ(read.json(), profile.json());
  EXPECT_EQ(read.bf16.heads, 3e6);
  EXPECT_EQ(read.ranks, 3);
  EXPECT_EQ(PlanProfile::from_json(R"({"schema": "zero.profile/1", "machine": {"cores": 2}})").bf16.flops, 0);
  const auto refused = [](const char* text, const char* why) {
    try {
      PlanProfile::from_json(text, "p.json");
      FAIL() << text;
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  refused("{}", "p.json: got no object with \"schema\"");
  refused("[", "p.json: got no object");
  refused(R"({"schema": "zero.profile/1", "link_byte_per_s": 1})", "did you mean \"link_bytes_per_s\"?");
  refused(R"({"schema": "zero.profile/1", "link_bytes_per_s": -1})", "expected a number of at least 0");
  refused(R"({"schema": "zero.profile/1", "ranks": "two"})", "expected a whole number");
}

TEST(Fit, FindsTheSpeedsThatTimesWereMadeFrom) {
  std::vector<planning::FitRow> rows;
  const double truth[] = {2e-9, 0, 3e-4, 1e-3};
  for (int i = 1; i <= 12; ++i) {
    planning::FitRow row{{1e6 * i * i, 1e5 * (i % 5 + 1), static_cast<double>(i % 3), 1}, 0, 1};
    for (std::size_t k = 0; k < 4; ++k) row.seconds += truth[k] * row.amounts[k];
    row.weight = 1 / row.seconds;
    rows.push_back(row);
  }
  const auto fit = planning::nonnegative_fit(rows);
  ASSERT_EQ(fit.size(), 4u);
  for (std::size_t k = 0; k < 4; ++k) EXPECT_NEAR(fit[k], truth[k], 1e-6 * truth[k] + 1e-15) << k;
  // An unneeded amount and one whose best speed would be negative get none.
  for (auto& row : rows) row.amounts[1] = 0, row.seconds -= 1e-4 * row.amounts[2] * 6;
  const auto held = planning::nonnegative_fit(rows);
  EXPECT_EQ(held[1], 0);
  EXPECT_EQ(held[2], 0);
  for (const double x : held) EXPECT_GE(x, 0);
}

}  // namespace
}  // namespace zero::plan_time_test
