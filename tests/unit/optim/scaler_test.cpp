// The loss scaler against the vectors of the configuration's specification, and DeepSpeed's algorithm
// (which it deviates from on purpose) as a model, with every difference on one table listed.
#include "optim/loss_scaler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include <zero/errors.h>

#include "optim/clipping.h"

namespace zero::optim::scaler_test {
namespace {

config::Settings fp16(int power, std::int64_t window, std::int64_t hysteresis, bool consecutive = false,
                      std::int64_t minimum = 1) {
  config::Settings settings;
  settings.precision = config::Precision::Fp16;
  settings.scaler = {0, power, window, hysteresis, consecutive, minimum};
  return settings;
}

// S after each step; 'o' overflows, anything else is good.
std::vector<double> run(LossScaler& scaler, const std::string& steps) {
  std::vector<double> scales;
  for (const char step : steps) {
    scaler.update(step == 'o');
    scales.push_back(scaler.scale());
  }
  return scales;
}
std::vector<double> run(const config::Settings& settings, const std::string& steps) {
  LossScaler scaler(settings);
  return run(scaler, steps);
}

using Scales = std::vector<double>;

TEST(LossScaler, Vectors) {
  EXPECT_EQ(run(fp16(4, 2, 1), "ggggogg"), (Scales{16, 32, 32, 64, 32, 32, 64}));
  EXPECT_EQ(run(fp16(4, 2, 2), "ogooggoo"), (Scales{16, 16, 8, 4, 4, 8, 8, 4}));
  EXPECT_EQ(run(fp16(2, 1000, 1), "oooo"), (Scales{2, 1, 1, 1}));
  EXPECT_EQ(run(fp16(4, 3, 2, true), "ogogoo"), (Scales{16, 16, 16, 16, 16, 8}));
}

TEST(LossScaler, LoggedRunOf23SkippedSteps) {
  auto settings = fp16(32, 1000, 2);
  settings.max_skipped_steps = 1000;
  LossScaler scaler(settings);
  EXPECT_EQ(scaler.scale(), std::ldexp(1, 32));
  const auto first = run(scaler, std::string(21, 'o'));
  for (int i = 0; i < 21; ++i) EXPECT_EQ(first[i], std::ldexp(1, 32 - i)) << "step " << i;
  EXPECT_EQ(run(scaler, "ggggogggo"), (Scales{4096, 4096, 4096, 4096, 2048, 2048, 2048, 2048, 1024}));
}

TEST(LossScaler, DefaultsStartAt65536AndGrowAfterAThousandCleanSteps) {
  config::Settings settings;
  settings.precision = config::Precision::Fp16;
  LossScaler scaler(settings);
  EXPECT_EQ(scaler.scale(), 65536);
  run(scaler, std::string(999, 'g'));
  EXPECT_EQ(scaler.scale(), 65536);
  run(scaler, "g");
  EXPECT_EQ(scaler.scale(), 131072);
}

TEST(LossScaler, HalvingStopsAtAMinimumThatIsNoPowerOfTwo) {
  EXPECT_EQ(run(fp16(4, 2, 1, false, 3), "oooogg"), (Scales{8, 4, 3, 3, 3, 6}));
}

TEST(LossScaler, NeverAboveItsBound) {
  EXPECT_EQ(run(fp16(31, 1, 1), "ggg"), (Scales{0x1p32, 0x1p32, 0x1p32}));
  EXPECT_EQ(run(fp16(40, 1, 1), "ogg"), (Scales{0x1p39, 0x1p40, 0x1p40}));
}

TEST(LossScaler, OtherRecipesHaveAFixedScale) {
  config::Settings settings;
  for (const auto precision : {config::Precision::Fp32, config::Precision::Bf16}) {
    settings.precision = precision;
    settings.scaler.static_scale = 128;  // fp16's key: no effect here
    EXPECT_EQ(run(settings, "goggo"), (Scales{1, 1, 1, 1, 1}));
  }
  settings.loss_scaling = true;  // it has an effect with this
  EXPECT_EQ(run(settings, "goggo"), (Scales{128, 128, 128, 128, 128}));
  settings.scaler = {0, 4, 2, 1, false, 1};
  EXPECT_EQ(run(settings, "ggggogg"), (Scales{16, 32, 32, 64, 32, 32, 64}));
  settings.loss_scaling = false;
  settings.scaler.static_scale = 128;
  settings.precision = config::Precision::Fp16;
  LossScaler fixed(settings);
  EXPECT_FALSE(fixed.dynamic());
  EXPECT_EQ(fixed.scale(), 128);
  EXPECT_EQ(run(fixed, "ogoo"), (Scales{128, 128, 128, 128}));
}

TEST(LossScaler, ReportsWhenNothingHelpsAnyMore) {
  auto settings = fp16(1, 1000, 2);
  settings.max_skipped_steps = 3;
  LossScaler scaler(settings);
  EXPECT_FALSE(scaler.update(true));  // spends the hysteresis
  EXPECT_FALSE(scaler.update(true));  // 2 -> 1
  EXPECT_FALSE(scaler.update(true));
  EXPECT_FALSE(scaler.update(true));
  EXPECT_EQ(scaler.state().floor, 2);
  EXPECT_FALSE(scaler.update(false));  // a good step starts the count again
  EXPECT_EQ(scaler.state().floor, 0);
  EXPECT_FALSE(scaler.update(true));
  EXPECT_FALSE(scaler.update(true));
  EXPECT_TRUE(scaler.update(true));

  settings.precision = config::Precision::Bf16;
  LossScaler bf16(settings);
  EXPECT_FALSE(bf16.update(true));
  EXPECT_FALSE(bf16.update(true));
  EXPECT_TRUE(bf16.update(true));

  settings.max_skipped_steps = 1;
  EXPECT_TRUE(LossScaler(settings).update(true));
}

TEST(LossScaler, ContinuesFromItsState) {
  const std::string before = "ogoggog", after = "ggogoogggg";
  LossScaler whole(fp16(6, 3, 2)), first(fp16(6, 3, 2)), second(fp16(6, 3, 2));
  run(whole, before);
  run(first, before);
  second.set_state(first.state());
  EXPECT_EQ(second.state(), first.state());
  EXPECT_EQ(run(second, after), run(whole, after));
  EXPECT_EQ(second.state(), whole.state());
}

TEST(LossScaler, StateOfAnotherRecipeOrSetting) {
  config::Settings bf16;
  bf16.precision = config::Precision::Bf16;
  LossScaler fixed(bf16);
  fixed.set_state({65536, 2, 5, 1});
  EXPECT_EQ(fixed.scale(), 1);  // a bf16 run must not unscale by an fp16 run's scale

  LossScaler scaler(fp16(4, 3, 2, false, 8));
  scaler.set_state({2, 7, 100, 0});
  EXPECT_EQ(scaler.state(), (LossScaler::State{8, 2, 2, 0}));
  EXPECT_EQ(run(scaler, "g"), Scales{16});  // a shorter window than the state's count still ends
  scaler.set_state({0x1p60, 1, 0, 0});
  EXPECT_EQ(scaler.scale(), 0x1p32);

  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const LossScaler::State& bad : {LossScaler::State{0, 1, 0, 0},
                                       {-2, 1, 0, 0},
                                       {nan, 1, 0, 0},
                                       {INFINITY, 1, 0, 0},
                                       {2, 0, 0, 0},
                                       {2, 1, -2, 0},
                                       {2, 1, 0, -1}}) {
    try {
      scaler.set_state(bad);
      ADD_FAILURE() << "a damaged state was taken";
    } catch (const ConfigError& error) {
      EXPECT_EQ(error.code(), ExitCode::kCheckpoint);
    }
  }
  EXPECT_EQ(scaler.scale(), 0x1p32);
}

// DeepSpeed's dynamic scale for ZeRO, for comparison only.
struct DeepSpeedScaler {
  double scale;
  int window, hysteresis, left;
  double minimum;
  bool consecutive;
  int step = 0, last_bad = -1;
  DeepSpeedScaler(double start, int window_steps, int full, double smallest, bool refill)
      : scale(start), window(window_steps), hysteresis(full), left(full), minimum(smallest), consecutive(refill) {}
  double update(bool bad) {
    if (bad) {
      if (hysteresis == 1 || left == 1)
        scale = std::max(scale / 2, minimum);
      else
        --left;
      last_bad = step;
    } else {
      if (consecutive) left = hysteresis;
      const int clean = step - last_bad - 1;
      if (clean > 0 && clean % window == 0) {
        if (!consecutive) left = hysteresis;
        scale *= 2;
      }
    }
    ++step;
    return scale;
  }
};

// S = 16, window 3, hysteresis 2, minimum 1.
constexpr const char* kTableSteps = "oo..o.....o.........";
const Scales kPlain = {16, 8, 8, 8, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 16, 16, 16, 32, 32, 32};
const Scales kConsecutive = {16, 8, 8, 8, 8, 8, 8, 8, 16, 16, 16, 16, 16, 16, 32, 32, 32, 64, 64, 64};

TEST(DeepSpeedsScaler, ModelReproducesItsTable) {
  for (const bool consecutive : {false, true}) {
    DeepSpeedScaler model(16, 3, 2, 1, consecutive);
    Scales got;
    for (const char* step = kTableSteps; *step; ++step) got.push_back(model.update(*step == 'o'));
    EXPECT_EQ(got, consecutive ? kConsecutive : kPlain);
  }
  DeepSpeedScaler fresh(16, 3, 2, 1, false), floor(4, 3, 1, 1, false);
  Scales got;
  for (int i = 0; i < 10; ++i) got.push_back(fresh.update(false));
  EXPECT_EQ(got, (Scales{16, 16, 16, 32, 32, 32, 64, 64, 64, 128}));
  got.clear();
  for (int i = 0; i < 4; ++i) got.push_back(floor.update(true));
  EXPECT_EQ(got, (Scales{2, 1, 1, 1}));
}

// libzero grows the scale after exactly `window` good steps; DeepSpeed's first growth after an overflow (or the start)
// is one good step later, so every growth of the table is one step earlier here:
TEST(DeepSpeedsScaler, OursDiffersWhereItSaysSo) {
  const auto plain = run(fp16(4, 3, 2), kTableSteps), consecutive = run(fp16(4, 3, 2, true), kTableSteps);
  const auto differences = [](const Scales& ours, const Scales& theirs) {
    std::vector<int> steps;
    for (int i = 0; i < static_cast<int>(ours.size()); ++i)
      if (ours[i] != theirs[i]) steps.push_back(i);
    return steps;
  };
  // Step 7: our third clean step after the bad one at 4. 13 and 16 likewise after the one at 10; 19: the
  // next window of three, which DeepSpeed ends at step 20.
  EXPECT_EQ(differences(plain, kPlain), (std::vector<int>{7, 13, 16, 19}));
  EXPECT_EQ(differences(consecutive, kConsecutive), (std::vector<int>{7, 13, 16, 19}));
  for (const int step : {7, 13, 16, 19}) {
    EXPECT_EQ(plain[step], 2 * kPlain[step]);
    EXPECT_EQ(consecutive[step], 2 * kConsecutive[step]);
  }
  // A fresh start shows the same: 16 16 32 instead of 16 16 16 32. Nothing differs before any growth.
  EXPECT_EQ(run(fp16(4, 3, 2), "gggggggggg"), (Scales{16, 16, 32, 32, 32, 64, 64, 64, 128, 128}));
  EXPECT_EQ(run(fp16(2, 3, 1), "oooo"), (Scales{2, 1, 1, 1}));
}

TEST(GradientFactor, IsOneWhenNothingIsToBeDone) {
  EXPECT_EQ(gradient_factor(1, 123, 0), 1.0f);
  EXPECT_EQ(gradient_factor(1, 0.5, 1), 1.0f);
  EXPECT_EQ(gradient_factor(1, 0, 1), 1.0f);
  EXPECT_EQ(gradient_factor(1, -1, 1), 1.0f);  // the norm is not known
  EXPECT_EQ(gradient_factor(1, INFINITY, 1), 1.0f);
  EXPECT_EQ(gradient_factor(1, NAN, 1), 1.0f);
}

TEST(GradientFactor, UnscalesAndClipsWithOneRounding) {
  EXPECT_EQ(gradient_factor(65536, 0.5, 1), 0x1p-16f);
  EXPECT_EQ(gradient_factor(1, 10, 1), static_cast<float>(1 / 10.000001));
  EXPECT_EQ(gradient_factor(1024, 10, 2.5), static_cast<float>(1 / (1024 * (10.000001 / 2.5))));
  EXPECT_EQ(gradient_factor(1, 1, 1), static_cast<float>(1 / 1.000001));  // as torch's, just above the limit
  EXPECT_EQ(gradient_factor(8, 0, 0, 1.0 / 3), static_cast<float>(1.0 / 24));
}

}  // namespace
}  // namespace zero::optim::scaler_test
