// The schedules against the specification's vectors: values, boundaries, groups, momentum, and
// DeepSpeed's lag by one update.
#include "optim/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

#include <zero/errors.h>

namespace zero::optim::schedule_test {
namespace {

using config::ScheduleSettings;
using config::ScheduleType;

ScheduleSettings warmup(ScheduleType type, std::int64_t steps, bool log, std::int64_t total = 0, double max = 1e-3) {
  ScheduleSettings s;
  s.type = type;
  s.warmup_max_lr = {max};
  s.warmup_num_steps = steps;
  s.warmup_log = log;
  s.total_num_steps = total;
  return s;
}

// Rates from s = 0, to the digits of the vectors.
void expect_rates(const Schedule& schedule, const std::vector<double>& wanted, double tolerance = 5e-9) {
  for (std::size_t s = 0; s < wanted.size(); ++s)
    EXPECT_NEAR(schedule.rate(0, static_cast<std::int64_t>(s)), wanted[s], tolerance * wanted[s]) << "s = " << s;
}

TEST(Schedule, ConstantIsTheOptimizersRate) {
  const Schedule schedule({}, {3e-4, 1e-5});
  for (const std::int64_t s : {-1, 0, 1, 1000000}) {
    EXPECT_EQ(schedule.rate(0, s), 3e-4);
    EXPECT_EQ(schedule.rate(1, s), 1e-5);
    EXPECT_FALSE(schedule.momentum(0, s));
  }
}

TEST(Schedule, WarmupLR) {
  expect_rates(Schedule(warmup(ScheduleType::WarmupLR, 4, true), {1}), {0, 5e-4, 7.9248125e-4, 1e-3, 1e-3});
  expect_rates(Schedule(warmup(ScheduleType::WarmupLR, 4, false), {1}), {0, 2.5e-4, 5e-4, 7.5e-4, 1e-3});
  const Schedule seed(warmup(ScheduleType::WarmupLR, 1000, true), {1});
  EXPECT_NEAR(seed.rate(0, 1), 1.003433319e-4, 1e-13);
  EXPECT_NEAR(seed.rate(0, 9), 1e-3 / 3, 1e-15);
  EXPECT_NEAR(seed.rate(0, 99), 2e-3 / 3, 1e-15);
  EXPECT_NEAR(seed.rate(0, 999), 1e-3, 1e-15);
  // One warm-up step counts as two.
  expect_rates(Schedule(warmup(ScheduleType::WarmupLR, 1, false), {1}), {0, 5e-4, 1e-3});
}

TEST(Schedule, WarmupLRWithoutMaximumEndsAtTheOptimizersRate) {
  auto settings = warmup(ScheduleType::WarmupLR, 2, false);
  settings.warmup_max_lr.clear();
  const Schedule schedule(settings, {2e-3, 4e-3});
  EXPECT_TRUE(schedule.uses_base_lr());
  EXPECT_EQ(schedule.rate(0, 5), 2e-3);
  EXPECT_EQ(schedule.rate(1, 5), 4e-3);
  EXPECT_EQ(schedule.rate(1, 1), 2e-3);
}

TEST(Schedule, WarmupDecayLR) {
  expect_rates(Schedule(warmup(ScheduleType::WarmupDecayLR, 2, false, 6), {1}),
               {0, 5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4, 0, 0});
  const Schedule seed(warmup(ScheduleType::WarmupDecayLR, 30, true, 300, 3e-5), {1});
  const std::pair<std::int64_t, double> vectors[] = {
      {0, 0},     {1, 6.113851413e-6}, {9, 2.030977478e-5}, {15, 2.445540565e-5},  {28, 2.970097397e-5},
      {29, 3e-5}, {30, 3e-5},          {165, 1.5e-5},       {299, 1.111111111e-7}, {300, 0},
      {5000, 0}};
  for (const auto& [s, rate] : vectors) EXPECT_NEAR(seed.rate(0, s), rate, 1e-14) << "s = " << s;
  const Schedule linear(warmup(ScheduleType::WarmupDecayLR, 30, false, 300, 3e-5), {1});
  EXPECT_NEAR(linear.rate(0, 1), 1e-6, 1e-20);
  EXPECT_NEAR(linear.rate(0, 9), 9e-6, 1e-20);
  EXPECT_NEAR(linear.rate(0, 29), 2.9e-5, 1e-19);
}

TEST(Schedule, WarmupCosineLR) {
  expect_rates(Schedule(warmup(ScheduleType::WarmupCosineLR, 2, true, 6), {1e-3}),
               {0, 1e-3, 8.53568035e-4, 5.0005e-4, 1.46531965e-4, 1e-7, 1e-7});
  const Schedule ratio(warmup(ScheduleType::WarmupCosineLR, 10, true, 100), {1});
  const std::pair<std::int64_t, double> vectors[] = {{9, 1},           {10, .999695444}, {54, .50005},
                                                     {98, .000404556}, {99, .0001},      {500, .0001}};
  for (const auto& [s, wanted] : vectors) EXPECT_NEAR(ratio.rate(0, s), wanted, 1e-9) << "s = " << s;
  auto settings = warmup(ScheduleType::WarmupCosineLR, 4, false, 8);
  settings.warmup_min_ratio = 0.2;
  const Schedule from_ratio(settings, {1, 10});
  EXPECT_DOUBLE_EQ(from_ratio.rate(0, -1), 0);  // the first update, as in DeepSpeed
  EXPECT_DOUBLE_EQ(from_ratio.rate(0, 0), 0.2);
  EXPECT_DOUBLE_EQ(from_ratio.rate(0, 2), 0.6);
  EXPECT_DOUBLE_EQ(from_ratio.rate(1, 2), 6);
}

TEST(Schedule, LRRangeTest) {
  ScheduleSettings s;
  s.type = ScheduleType::LRRangeTest;
  s.range_step_size = 2;
  expect_rates(Schedule(s, {1}), {1e-3, 1.5e-3, 2e-3, 2.5e-3});
  s.range_staircase = true;
  expect_rates(Schedule(s, {1}), {1e-3, 1e-3, 2e-3, 2e-3});
  s.range_staircase = false;
  s.range_step_size = 10;  // as counted from DeepSpeed's t = -1
  const Schedule wide(s, {1});
  EXPECT_DOUBLE_EQ(wide.rate(0, 10), 2e-3);
  EXPECT_DOUBLE_EQ(wide.rate(0, 15), 2.5e-3);
  EXPECT_EQ(wide.rate(0, -1), 1e-3);
}

ScheduleSettings one_cycle(double low, double high, std::int64_t first, std::optional<std::int64_t> second) {
  ScheduleSettings s;
  s.type = ScheduleType::OneCycle;
  s.cycle_min_lr = {low};
  s.cycle_max_lr = {high};
  s.cycle_first_step_size = first;
  s.cycle_second_step_size = second;
  return s;
}

TEST(Schedule, OneCycle) {
  auto s = one_cycle(1e-3, 5e-3, 2, 4);
  s.decay_lr_rate = 1;
  s.decay_step_size = 2;
  const Schedule schedule(s, {1});
  expect_rates(schedule, {1e-3, 3e-3, 5e-3, 4e-3, 3e-3, 2e-3, 1e-3, 6.66666667e-4, 5e-4});
  const double momenta[] = {.9, .85, .8, .825, .85, .875, .9};
  for (int i = 0; i < 7; ++i) EXPECT_NEAR(*schedule.momentum(0, i), momenta[i], 1e-15) << "s = " << i;
  EXPECT_FALSE(schedule.uses_base_lr());
  // The second step is as long as the first unless given; afterwards the minimum stays without a decay.
  expect_rates(Schedule(one_cycle(.001, .011, 5, {}), {1}),
               {.001, .003, .005, .007, .009, .011, .009, .007, .005, .003, .001, .001, .001});
}

TEST(Schedule, OneCycleInStairs) {
  auto s = one_cycle(0, 1, 10, 5);
  s.cycle_first_stair_count = 5;
  const Schedule inherited(s, {1});
  for (int i = 0; i <= 10; ++i) EXPECT_DOUBLE_EQ(inherited.rate(0, i), (i / 2) / 5.0) << i;
  for (int i = 11; i <= 15; ++i) EXPECT_DOUBLE_EQ(inherited.rate(0, i), (15 - i) / 5.0) << i;
  s.cycle_second_stair_count = 2;
  const Schedule own(s, {1});
  const double second[] = {1, .5, .5, 0, 0, 0};  // k = 1, .8, .6, .4, .2, 0
  EXPECT_DOUBLE_EQ(own.rate(0, 10), 1);
  for (int i = 1; i <= 5; ++i) EXPECT_DOUBLE_EQ(own.rate(0, 10 + i), second[i]) << i;
  // From integers: 3 of 3 stairs at s/F = 2/3 is exactly two stairs.
  auto third = one_cycle(0, 3, 3, 3);
  third.cycle_first_stair_count = 3;
  expect_rates(Schedule(third, {1}), {0, 1, 2, 3, 2, 1, 0});
}

TEST(Schedule, MomentumAfterTheCycleStaysBelowOne) {
  auto s = one_cycle(0, 1, 1, 1);
  s.decay_mom_rate = 0.05;
  EXPECT_EQ(Schedule(s, {1}).momentum(0, 100), 0.9);  // no decay_step_size, no decay
  s.decay_step_size = 1;
  const Schedule growing(s, {1});
  EXPECT_NEAR(*growing.momentum(0, 3), 0.945, 1e-15);
  EXPECT_LT(static_cast<float>(*growing.momentum(0, 1000)), 1.0f);
  s.cycle_momentum = false;
  EXPECT_FALSE(Schedule(s, {1}).momentum(0, 3));
}

TEST(Schedule, IndexAndDeepSpeedsLag) {
  auto settings = warmup(ScheduleType::WarmupLR, 4, false);
  EXPECT_EQ(Schedule(settings, {1}).index(0), 0);
  settings.last_batch_iteration = 6;
  EXPECT_EQ(Schedule(settings, {1}).index(3), 10);
  settings.last_batch_iteration = -2;
  settings.warmup_min_lr = {1e-5};
  const Schedule lagging(settings, {1});
  EXPECT_EQ(lagging.index(0), -1);
  EXPECT_EQ(lagging.rate(0, lagging.index(0)), 1e-5);  // its first two updates run at the minimum
  EXPECT_EQ(lagging.rate(0, lagging.index(1)), 1e-5);
  EXPECT_GT(lagging.rate(0, lagging.index(2)), 1e-5);
}

TEST(Schedule, ListsHaveOneEntryPerGroup) {
  auto settings = warmup(ScheduleType::WarmupLR, 2, false);
  settings.warmup_max_lr = {1e-3, 2e-3, 3e-3};
  settings.warmup_min_lr = {0, 1e-4, 2e-4};
  const Schedule schedule(settings, {1, 1, 1});
  EXPECT_EQ(schedule.rate(1, 0), 1e-4);
  EXPECT_EQ(schedule.rate(2, 9), 3e-3);
  EXPECT_THROW(Schedule(settings, {1, 1}), ConfigError);
  auto cycle = one_cycle(0, 1, 1, 1);
  cycle.cycle_max_lr = {1, 2};
  cycle.cycle_max_mom = {0.9, 0.95};
  const Schedule per_group(cycle, {1, 1});
  EXPECT_EQ(per_group.rate(1, 1), 2);
  EXPECT_EQ(per_group.momentum(1, 0), 0.95);
  EXPECT_THROW(Schedule(cycle, {1, 1, 1}), ConfigError);
  cycle.cycle_min_lr = {};
  EXPECT_THROW(Schedule(cycle, {1, 1}), ConfigError);
}

TEST(Schedule, ContradictionsAreConfigErrors) {
  auto low = warmup(ScheduleType::WarmupLR, 2, false);
  low.warmup_min_lr = {2e-3};
  EXPECT_THROW(Schedule(low, {1}), ConfigError);
  EXPECT_THROW(Schedule(warmup(ScheduleType::WarmupDecayLR, 10, false, 9), {1}), ConfigError);
  EXPECT_THROW(Schedule(warmup(ScheduleType::WarmupCosineLR, 10, false, 9), {1}), ConfigError);
  EXPECT_THROW(Schedule(one_cycle(2, 1, 1, 1), {1}), ConfigError);
  try {
    Schedule(one_cycle(2, 1, 1, 1), {1});
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("scheduler.params.cycle_min_lr: got 2"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace zero::optim::schedule_test
