// The reference of `zero bench optimizer`: a wrong element is found at any position, and the reference follows the
// textbook recurrences.
#include "optim/update_reference.h"

#include <gtest/gtest.h>

#include <cmath>

namespace zero::cli::update_reference_test {
namespace {

TEST(FirstDifference, FindsAnyElementAndAnyBit) {
  const std::vector<float> period{0.0f, 1.0f, NAN, 3.0f, 4.0f};
  for (const std::int64_t elements : {1, 4, 5, 6, 23}) {
    std::vector<float> got;
    for (std::int64_t i = 0; i < elements; ++i) got.push_back(period[static_cast<std::size_t>(i % 5)]);
    const auto first = [&] { return optim::first_difference(got.data(), period.data(), elements, 5, 4); };
    EXPECT_EQ(first(), -1);
    for (std::int64_t i = elements - 1; i >= 0; --i) {
      auto& value = got[static_cast<std::size_t>(i)];
      value = value == 0 ? -0.0f : std::nextafter(value, 9.0f);
      if (std::isnan(value)) value = 2.0f;
      EXPECT_EQ(first(), i);
    }
  }
  const std::uint16_t halves[] = {7, 8, 7, 9}, two[] = {7, 8};
  EXPECT_EQ(optim::first_difference(halves, two, 4, 2, 2), 3);
  EXPECT_EQ(optim::first_difference(halves, two, 3, 2, 2), -1);
}

// The recurrences in fp64, straight from the papers; fp32 may drift by a few roundings a step.
TEST(ReferenceUpdate, FollowsTheRecurrences) {
  constexpr double kRate = 1e-3, kDecay = 0.1, kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-8;
  const double first = 0.75, gradient = -0.03125 * 0.5;
  constexpr int kSteps = 20;
  const auto got = [&](const char* rule) {
    return optim::reference_update(rule, {0.75f}, {-0.03125f}, 0.5f, kSteps).master[0];
  };
  for (const bool decoupled : {true, false}) {
    double p = first, m = 0, v = 0;
    for (int t = 1; t <= kSteps; ++t) {
      const double g = decoupled ? gradient : gradient + kDecay * p;
      if (decoupled) p -= kRate * kDecay * p;
      m = kBeta1 * m + (1 - kBeta1) * g;
      v = kBeta2 * v + (1 - kBeta2) * g * g;
      p -= kRate * (m / (1 - std::pow(kBeta1, t))) / (std::sqrt(v / (1 - std::pow(kBeta2, t))) + kEps);
    }
    EXPECT_NEAR(got(decoupled ? "adamw" : "adam"), p, kSteps * 1e-7);
  }
  double sgd = first, buffer = 0, adagrad = first, sum = 0, lion = first, m = 0;
  for (int t = 1; t <= kSteps; ++t) {
    const double g = gradient + kDecay * sgd;
    buffer = t == 1 ? g : 0.9 * buffer + g;
    sgd -= kRate * buffer;
    const double h = gradient + kDecay * adagrad;
    sum += h * h;
    adagrad -= kRate * h / (std::sqrt(sum) + kEps);
    const double u = kBeta1 * m + (1 - kBeta1) * gradient;
    lion = lion * (1 - kRate * kDecay) - kRate * (u > 0 ? 1 : u < 0 ? -1 : 0);
    m = kBeta2 * m + (1 - kBeta2) * gradient;
  }
  EXPECT_NEAR(got("sgd"), sgd, kSteps * 1e-7);
  EXPECT_NEAR(got("adagrad"), adagrad, kSteps * 1e-7);
  EXPECT_NEAR(got("lion"), lion, kSteps * 1e-7);
  for (const auto& rule : optim::update_rules()) EXPECT_NE(got(rule.c_str()), 0.75f) << rule;
}

}  // namespace
}  // namespace zero::cli::update_reference_test
