// The update rules compared with a scalar model with the documented rounding, bit for bit on every SIMD target, for any
// number of threads and any division; groups, schedules, counts and errors. The comparison with torch's kernels is
// optimizer_torch_test.cpp. The model requires -ffp-contract=off.
#include "optim/sharded_optimizer.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include <zero/errors.h>

#include "unit/optim/rule_model.h"

namespace zero::optim::optimizer_test {
namespace {

using config::OptimizerSettings;
using config::OptimizerType;
using kernels::Dtype;

constexpr Dtype kDtypes[] = {Dtype::F32, Dtype::BF16, Dtype::F16};

OptimizerSettings adam(OptimizerType type = OptimizerType::AdamW) {
  OptimizerSettings s;
  s.type = type;
  s.lr = 1e-2;
  s.weight_decay = 0.1;
  return s;
}

// One of every rule and of every branch inside one.
std::vector<std::pair<std::string, OptimizerSettings>> all_rules() {
  std::vector<std::pair<std::string, OptimizerSettings>> rules;
  const auto add = [&](const char* name, OptimizerSettings s,
                       const std::function<void(OptimizerSettings&)>& change = nullptr) {
    if (change) change(s);
    rules.emplace_back(name, s);
  };
  add("adamw", adam());
  add("adamw, small beta1, no bias correction", adam(), [](auto& s) { s.beta1 = 0.3, s.bias_correction = false; });
  add("adam as adamw", adam(OptimizerType::Adam));
  add("adam with L2", adam(OptimizerType::Adam), [](auto& s) { s.adam_w_mode = false; });
  add("adam without decay", adam(OptimizerType::Adam), [](auto& s) { s.adam_w_mode = false, s.weight_decay = 0; });
  add("sgd", adam(OptimizerType::Sgd));
  add("sgd without decay", adam(OptimizerType::Sgd), [](auto& s) { s.weight_decay = 0; });
  add("sgd with momentum", adam(OptimizerType::Sgd), [](auto& s) { s.momentum = 0.9, s.dampening = 0.3; });
  add("nesterov", adam(OptimizerType::Sgd), [](auto& s) { s.momentum = 0.8, s.nesterov = true; });
  add("adagrad", adam(OptimizerType::Adagrad),
      [](auto& s) { s.eps = 1e-10, s.lr_decay = 0.1, s.initial_accumulator_value = 0.5; });
  add("lion", adam(OptimizerType::Lion), [](auto& s) { s.beta2 = 0.99; });
  add("amsgrad", adam(), [](auto& s) { s.amsgrad = true; });
  add("amsgrad with L2", adam(OptimizerType::Adam), [](auto& s) { s.adam_w_mode = false, s.amsgrad = true; });
  add("rmsprop", adam(OptimizerType::RmsProp));
  add("rmsprop with momentum", adam(OptimizerType::RmsProp), [](auto& s) { s.momentum = 0.9, s.weight_decay = 0; });
  add("rmsprop, centered", adam(OptimizerType::RmsProp), [](auto& s) { s.centered = true, s.alpha = 0.3; });
  add("rmsprop, centered, with momentum", adam(OptimizerType::RmsProp),
      [](auto& s) { s.centered = true, s.momentum = 0.5; });
  for (const bool decoupled : {false, true}) {
    const auto decay = [=](auto& s) { s.decoupled_weight_decay = decoupled; };
    add(decoupled ? "nadam, decoupled" : "nadam", adam(OptimizerType::NAdam), decay);
    add(decoupled ? "radam, decoupled" : "radam", adam(OptimizerType::RAdam), decay);
  }
  add("adamax", adam(OptimizerType::Adamax));
  add("adadelta", adam(OptimizerType::Adadelta), [](auto& s) { s.eps = 1e-6; });
  return rules;
}

// A shard: master, slots, and a compute copy in some dtype.
struct Shard {
  std::vector<float> master, slots[3];
  std::vector<char> parameter;
  bool operator==(const Shard& other) const {  // bits, so that -0 and NaN count
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), 4 * a.size()) == 0);
    };
    return same(master, other.master) && same(slots[0], other.slots[0]) && same(slots[1], other.slots[1]) &&
           same(slots[2], other.slots[2]) && parameter == other.parameter;
  }
};

std::vector<float> normal(std::int64_t numel, unsigned seed, float size = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution(0, size);
  std::vector<float> values(static_cast<std::size_t>(numel));
  for (auto& value : values) value = distribution(random);
  return values;
}

Shard new_shard(const ShardedOptimizer& optimizer, std::int64_t numel, Dtype parameter) {
  Shard shard;
  shard.master = normal(numel, 1);
  for (int k = 0; k < optimizer.num_slots(); ++k)
    shard.slots[k].assign(static_cast<std::size_t>(numel), optimizer.slot_initial_value());
  shard.parameter.resize(static_cast<std::size_t>(numel) * kernels::size_of(parameter));
  return shard;
}

// Step k's gradient in a dtype, with some zeros, denormals and huge values.
std::vector<char> gradient(std::int64_t numel, int step, Dtype dtype) {
  auto values = normal(numel, 100 + static_cast<unsigned>(step), 0.1f);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i % 7 == 3) values[i] = 0;
    if (i % 31 == 5) values[i] = 1e-39f;
    if (i % 53 == 8) values[i] *= 1e5f;
  }
  std::vector<char> out(values.size() * kernels::size_of(dtype));
  kernels::convert(out.data(), dtype, values.data(), Dtype::F32, numel);
  return out;
}

Span span_of(Shard& shard, const std::vector<char>& gradient, Dtype gradient_dtype, Dtype parameter_dtype,
             std::int64_t begin, std::int64_t end) {
  const auto at = [](auto& values, std::int64_t i) { return values.empty() ? nullptr : values.data() + i; };
  Span span;
  span.master = shard.master.data() + begin;
  for (int k = 0; k < 3; ++k) span.slots[k] = at(shard.slots[k], begin);
  span.gradient = gradient.data() + begin * static_cast<std::int64_t>(kernels::size_of(gradient_dtype));
  span.gradient_dtype = gradient_dtype;
  span.parameter = at(shard.parameter, begin * static_cast<std::int64_t>(kernels::size_of(parameter_dtype)));
  span.parameter_dtype = parameter_dtype;
  span.numel = end - begin;
  return span;
}

// Steps over the whole shard; `cut` returns the end of the span that begins at an element.
using Cut = std::function<std::int64_t(std::int64_t)>;
Shard train(const OptimizerSettings& settings, std::int64_t numel, Dtype in, Dtype out, int steps, float factor,
            const Cut& cut = nullptr) {
  ShardedOptimizer optimizer(settings, {}, {});
  auto shard = new_shard(optimizer, numel, out);
  for (int step = 0; step < steps; ++step) {
    const auto grad = gradient(numel, step, in);
    optimizer.begin_step();
    for (std::int64_t begin = 0, end; begin < numel; begin = end) {
      end = cut ? std::min(numel, cut(begin)) : numel;
      optimizer.update(span_of(shard, grad, in, out, begin, end), factor);
    }
    optimizer.end_step();
  }
  return shard;
}

Shard train_model(const OptimizerSettings& settings, std::int64_t numel, Dtype in, Dtype out, int steps, float factor) {
  const ShardedOptimizer optimizer(settings, {}, {});
  auto shard = new_shard(optimizer, numel, out);
  test::RuleModel model{settings};
  for (int step = 0; step < steps; ++step) {
    ++model.count;
    const auto grad = gradient(numel, step, in);
    std::vector<float> g(static_cast<std::size_t>(numel));
    kernels::convert(g.data(), Dtype::F32, grad.data(), in, numel);
    float none = 0;
    for (std::size_t i = 0; i < g.size(); ++i)
      model.update(shard.master[i], optimizer.num_slots() > 0 ? shard.slots[0][i] : none,
                   optimizer.num_slots() > 1 ? shard.slots[1][i] : none,
                   optimizer.num_slots() > 2 ? shard.slots[2][i] : none, g[i] * factor);
  }
  kernels::convert(shard.parameter.data(), out, shard.master.data(), Dtype::F32, numel);
  return shard;
}

class Update : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { kernels::set_simd_target(GetParam()); }
  void TearDown() override {
    kernels::set_simd_target("");
    omp_set_num_threads(threads_);
  }
  const int threads_ = omp_get_max_threads();
};
INSTANTIATE_TEST_SUITE_P(Targets, Update, testing::ValuesIn(kernels::simd_targets()),
                         [](const auto& info) { return info.param; });

TEST_P(Update, EveryRuleAndRecipeHasTheModelsBits) {
  for (const auto& [name, settings] : all_rules())
    for (const auto in : kDtypes)
      for (const auto out : kDtypes)
        for (const std::int64_t numel : {1, 15, 16, 64, 333})
          ASSERT_EQ(train(settings, numel, in, out, 5, 1), train_model(settings, numel, in, out, 5, 1))
              << name << ", " << numel << " elements, gradient " << kernels::dtype_name(in) << ", parameter "
              << kernels::dtype_name(out);
}

TEST_P(Update, FactorIsOneRoundingOfTheGradient) {
  for (const auto& [name, settings] : all_rules())
    ASSERT_EQ(train(settings, 333, Dtype::BF16, Dtype::BF16, 3, 0.3f),
              train_model(settings, 333, Dtype::BF16, Dtype::BF16, 3, 0.3f))
        << name;
}

TEST_P(Update, SameBitsForAnyThreadsAndAnyCut) {
  const std::int64_t numel = (1 << 20) + 12345;
  for (const auto& [name, settings] : all_rules()) {
    omp_set_num_threads(1);
    const auto whole = train(settings, numel, Dtype::BF16, Dtype::F16, 2, 0.5f);
    for (const int threads : {2, 3}) {
      omp_set_num_threads(threads);
      ASSERT_EQ(train(settings, numel, Dtype::BF16, Dtype::F16, 2, 0.5f), whole)
          << name << ", " << threads << " threads";
    }
    std::mt19937 random(3);
    ASSERT_EQ(train(settings, numel, Dtype::BF16, Dtype::F16, 2, 0.5f,
                    [&](auto begin) { return begin + 1 + random() % 70000; }),
              whole)
        << name << ", cut at random";
  }
  kernels::set_simd_target("SCALAR");
  omp_set_num_threads(2);
  const auto scalar = train(adam(), numel, Dtype::F32, Dtype::BF16, 3, 1);
  kernels::set_simd_target(GetParam());
  ASSERT_EQ(train(adam(), numel, Dtype::F32, Dtype::BF16, 3, 1), scalar);
}

TEST_P(Update, NothingBehindTheSpanIsTouched) {
  for (const auto& [name, settings] : all_rules())
    for (std::int64_t numel = 0; numel < 40; ++numel) {
      ShardedOptimizer optimizer(settings, {}, {});
      auto shard = new_shard(optimizer, numel + 32, Dtype::BF16);
      const auto before = shard;
      const auto grad = gradient(numel + 32, 0, Dtype::F32);
      optimizer.begin_step();
      optimizer.update(span_of(shard, grad, Dtype::F32, Dtype::BF16, 0, numel), 1);
      const auto tail = [numel](const Shard& s) {
        Shard rest = s;
        rest.master.erase(rest.master.begin(), rest.master.begin() + numel);
        for (auto& slot : rest.slots)
          if (!slot.empty()) slot.erase(slot.begin(), slot.begin() + numel);
        rest.parameter.erase(rest.parameter.begin(), rest.parameter.begin() + 2 * numel);
        return rest;
      };
      ASSERT_EQ(tail(shard), tail(before)) << name << ", " << numel;
    }
}

TEST_P(Update, UnscalingByAPowerOfTwoIsFree) {
  const auto plain = normal(1000, 9);
  auto scaled = plain;
  for (auto& g : scaled) g *= 1024;
  Shard results[2];
  for (const bool with_scale : {false, true}) {
    ShardedOptimizer optimizer(adam(), {}, {});
    auto& shard = results[with_scale];
    shard = new_shard(optimizer, 1000, Dtype::F16);
    std::vector<char> grad(4000);
    std::memcpy(grad.data(), with_scale ? scaled.data() : plain.data(), 4000);
    optimizer.begin_step();
    optimizer.update(span_of(shard, grad, Dtype::F32, Dtype::F16, 0, 1000), with_scale ? 0x1p-10f : 1.0f);
    optimizer.end_step();
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST_P(Update, ParameterMayBeTheMasterOrAbsent) {
  const auto with_copy = train(adam(), 100, Dtype::F32, Dtype::F32, 3, 1);
  EXPECT_EQ(std::memcmp(with_copy.parameter.data(), with_copy.master.data(), 400), 0);
  for (const bool alias : {false, true}) {
    ShardedOptimizer optimizer(adam(), {}, {});
    auto shard = new_shard(optimizer, 100, Dtype::F32);
    for (int step = 0; step < 3; ++step) {
      const auto grad = gradient(100, step, Dtype::F32);
      optimizer.begin_step();
      auto span = span_of(shard, grad, Dtype::F32, Dtype::F32, 0, 100);
      span.parameter = alias ? shard.master.data() : nullptr;
      optimizer.update(span, 1);
      optimizer.end_step();
    }
    EXPECT_EQ(shard.master, with_copy.master);
    EXPECT_EQ(shard.slots[1], with_copy.slots[1]);
  }
}

TEST_P(Update, ANanReachesTheParameter) {
  for (const auto& [name, settings] : all_rules()) {
    ShardedOptimizer optimizer(settings, {}, {});
    auto shard = new_shard(optimizer, 40, Dtype::BF16);
    std::vector<float> g(40, 0.1f);
    g[5] = g[37] = NAN;
    std::vector<char> grad(160);
    std::memcpy(grad.data(), g.data(), 160);
    optimizer.begin_step();
    optimizer.update(span_of(shard, grad, Dtype::F32, Dtype::BF16, 0, 40), 1);
    for (std::size_t i = 0; i < 40; ++i) EXPECT_EQ(std::isnan(shard.master[i]), i == 5 || i == 37) << name << " " << i;
  }
}

// Distance from the same recurrence in fp64 with constants that were never rounded, over 1000 steps.
TEST(AdamW, StaysCloseToDoublePrecision) {
  constexpr std::int64_t kNumel = 1024;
  auto settings = adam();
  settings.lr = 1e-3;
  settings.weight_decay = 0.01;
  ShardedOptimizer optimizer(settings, {}, {});
  auto shard = new_shard(optimizer, kNumel, Dtype::F32);
  std::vector<double> p(shard.master.begin(), shard.master.end()), m(kNumel), v(kNumel);
  for (int step = 1; step <= 1000; ++step) {
    const auto g = normal(kNumel, 500 + static_cast<unsigned>(step));
    std::vector<char> grad(4 * kNumel);
    std::memcpy(grad.data(), g.data(), grad.size());
    optimizer.begin_step();
    optimizer.update(span_of(shard, grad, Dtype::F32, Dtype::F32, 0, kNumel), 1);
    optimizer.end_step();
    for (std::size_t i = 0; i < kNumel; ++i) {
      const double gi = g[i];
      p[i] *= 1 - settings.lr * settings.weight_decay;
      m[i] += (1 - settings.beta1) * (gi - m[i]);
      v[i] = settings.beta2 * v[i] + (1 - settings.beta2) * gi * gi;
      p[i] -= settings.lr / (1 - std::pow(settings.beta1, step)) * m[i] /
              (std::sqrt(v[i]) / std::sqrt(1 - std::pow(settings.beta2, step)) + settings.eps);
    }
    if (step != 1 && step != 10 && step != 100 && step != 1000) continue;
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < kNumel; ++i) {
      difference += (shard.master[i] - p[i]) * (shard.master[i] - p[i]);
      size += p[i] * p[i];
    }
    EXPECT_LT(std::sqrt(difference / size), step <= 100 ? 1e-5 : 3e-5) << "after " << step << " steps";
  }
}

// The model above shares the rules' source; this one is the formula in fp64, from the same state.
TEST(LionAndAdagrad, OneStepIsCloseToDoublePrecision) {
  auto lion = adam(OptimizerType::Lion), adagrad = adam(OptimizerType::Adagrad);
  lion.beta2 = 0.99;
  adagrad.lr_decay = 0.5;
  const auto g = normal(1000, 21), m0 = normal(1000, 22), s0 = normal(1000, 23);
  std::vector<char> grad(4000);
  std::memcpy(grad.data(), g.data(), 4000);
  for (const auto& settings : {lion, adagrad}) {
    ShardedOptimizer optimizer(settings, {}, {});
    optimizer.set_applied_steps(3);
    auto shard = new_shard(optimizer, 1000, Dtype::F32);
    const auto p0 = shard.master;
    const bool is_lion = settings.type == OptimizerType::Lion;
    for (std::size_t i = 0; i < 1000; ++i) shard.slots[0][i] = is_lion ? m0[i] : std::fabs(s0[i]);
    const auto slot0 = shard.slots[0];
    optimizer.begin_step();
    optimizer.update(span_of(shard, grad, Dtype::F32, Dtype::F32, 0, 1000), 1);
    for (std::size_t i = 0; i < 1000; ++i) {
      double p = p0[i], s = slot0[i], x = g[i];
      if (is_lion) {
        const double u = 0.9 * s + 0.1 * x;
        if (std::fabs(u) < 1e-6) continue;  // the sign is rounding's to choose
        p = p * (1 - settings.lr * settings.weight_decay) - settings.lr * (u > 0 ? 1 : -1);
        s = 0.99 * s + 0.01 * x;
      } else {
        x += settings.weight_decay * p;
        s += x * x;
        p -= settings.lr / (1 + 3 * settings.lr_decay) * x / (std::sqrt(s) + settings.eps);
      }
      ASSERT_NEAR(shard.master[i], p, 3e-7 * (1 + std::fabs(p))) << i;
      ASSERT_NEAR(shard.slots[0][i], s, 3e-7 * (1 + std::fabs(s))) << i;
    }
  }
}

TEST(Lion, DoesNotMoveWhereNothingPulls) {
  auto settings = adam(OptimizerType::Lion);
  settings.weight_decay = 0;
  ShardedOptimizer optimizer(settings, {}, {});
  auto shard = new_shard(optimizer, 20, Dtype::F32);
  const auto before = shard.master;
  optimizer.begin_step();
  optimizer.update(span_of(shard, std::vector<char>(80), Dtype::F32, Dtype::F32, 0, 20), 1);
  EXPECT_EQ(shard.master, before);
}

TEST(ShardedOptimizer, SlotsByRule) {
  const auto slots = [](const OptimizerSettings& settings) {
    const ShardedOptimizer optimizer(settings, {}, {});
    std::string names;
    for (int k = 0; k < optimizer.num_slots(); ++k) names += std::string(k ? " " : "") + optimizer.slot_name(k);
    EXPECT_THROW(optimizer.slot_name(optimizer.num_slots()), InternalError);
    return names;
  };
  EXPECT_EQ(slots(adam()), "exp_avg exp_avg_sq");
  EXPECT_EQ(slots(adam(OptimizerType::Adam)), "exp_avg exp_avg_sq");
  EXPECT_EQ(slots(adam(OptimizerType::Sgd)), "");
  EXPECT_EQ(slots(adam(OptimizerType::Lion)), "exp_avg");
  EXPECT_EQ(slots(adam(OptimizerType::Adagrad)), "sum");
  auto amsgrad = adam();
  amsgrad.amsgrad = true;
  EXPECT_EQ(slots(amsgrad), "exp_avg exp_avg_sq max_exp_avg_sq");
  auto rmsprop = adam(OptimizerType::RmsProp);
  rmsprop.centered = true, rmsprop.momentum = 0.9;
  EXPECT_EQ(slots(rmsprop), "square_avg momentum_buffer grad_avg");
  EXPECT_EQ(slots(adam(OptimizerType::Adamax)), "exp_avg exp_inf");
  EXPECT_EQ(slots(adam(OptimizerType::Adadelta)), "square_avg acc_delta");
  auto momentum = adam(OptimizerType::Sgd);
  momentum.momentum = 0.9;
  EXPECT_EQ(slots(momentum), "momentum_buffer");
  auto adagrad = adam(OptimizerType::Adagrad);
  adagrad.initial_accumulator_value = 0.25;
  EXPECT_EQ(ShardedOptimizer(adagrad, {}, {}).slot_initial_value(), 0.25f);
  EXPECT_EQ(ShardedOptimizer(adam(), {}, {}).slot_initial_value(), 0.0f);
}

TEST(ShardedOptimizer, GroupsByWildcard) {
  const ShardedOptimizer optimizer(
      adam(), {}, {{"*.bias", {}, 0.0}, {"head.*", 1e-4, {}}, {"layers.?.norm*.weight", {}, 0.5}, {"*", 5e-3, {}}});
  EXPECT_EQ(optimizer.num_parameter_groups(), 5);
  EXPECT_EQ(optimizer.parameter_group_of("layers.0.fc.bias"), 1);
  EXPECT_EQ(optimizer.parameter_group_of("head.bias"), 1);  // the first match
  EXPECT_EQ(optimizer.parameter_group_of("head.weight"), 2);
  EXPECT_EQ(optimizer.parameter_group_of("layers.3.norm2.weight"), 3);
  EXPECT_EQ(optimizer.parameter_group_of("layers.3.norm.weight"), 3);
  EXPECT_EQ(optimizer.parameter_group_of("layers.13.norm.weight"), 4);
  EXPECT_EQ(optimizer.lr(0), 1e-2);
  EXPECT_EQ(optimizer.lr(1), 1e-2);
  EXPECT_EQ(optimizer.lr(2), 1e-4);
  EXPECT_EQ(optimizer.lr(4), 5e-3);
  EXPECT_THROW(optimizer.lr(5), InternalError);

  const auto group_of = [](const char* pattern, const char* name) {
    return ShardedOptimizer(adam(), {}, {{pattern, {}, {}}}).parameter_group_of(name);
  };
  EXPECT_EQ(group_of("a*b*c", "aXbYbZc"), 1);
  EXPECT_EQ(group_of("a*b*c", "aXbYbZ"), 0);
  EXPECT_EQ(group_of("", "x"), 0);
  EXPECT_EQ(group_of("**", ""), 1);
  EXPECT_EQ(group_of("weight", "weights"), 0);
  EXPECT_EQ(group_of("*.weight", "weight"), 0);
  EXPECT_EQ(group_of("a?c", "ac"), 0);
}

TEST(ShardedOptimizer, EachGroupHasItsOwnRateAndDecay) {
  const std::vector<config::ParameterGroup> groups = {{"b*", 0.5, 0.0}, {"c*", {}, 1.0}};
  ShardedOptimizer optimizer(adam(OptimizerType::Sgd), {}, groups);
  float p[] = {1, 1, 1};
  const float g[] = {1, 1, 1};
  optimizer.begin_step();
  for (int group = 0; group < 3; ++group) {
    Span span;
    span.master = p + group;
    span.gradient = g + group;
    span.numel = 1;
    span.parameter_group = group;
    optimizer.update(span, 1);
  }
  EXPECT_FLOAT_EQ(p[0], 1 - 0.01f * 1.1f);
  EXPECT_FLOAT_EQ(p[1], 0.5f);
  EXPECT_FLOAT_EQ(p[2], 1 - 0.01f * 2);
}

config::ScheduleSettings warmup() {
  config::ScheduleSettings s;
  s.type = config::ScheduleType::WarmupLR;
  s.warmup_max_lr = {1e-2};
  s.warmup_num_steps = 4;
  s.warmup_log = false;
  return s;
}

TEST(ShardedOptimizer, RatesFollowAppliedUpdates) {
  ShardedOptimizer optimizer(adam(), warmup(), {});
  for (const double rate : {0.0, 2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2}) {
    EXPECT_DOUBLE_EQ(optimizer.lr(), rate);
    optimizer.begin_step();
    EXPECT_DOUBLE_EQ(optimizer.lr(), rate);
    optimizer.end_step();
  }
  EXPECT_EQ(optimizer.applied_steps(), 6);
  optimizer.set_applied_steps(2);
  EXPECT_DOUBLE_EQ(optimizer.lr(), 5e-3);
}

TEST(ShardedOptimizer, ContinuesFromSlotsAndCount) {
  for (const auto& [name, settings] : all_rules()) {
    const auto whole = train(settings, 100, Dtype::BF16, Dtype::BF16, 6, 1);
    auto shard = train(settings, 100, Dtype::BF16, Dtype::BF16, 3, 1);
    ShardedOptimizer resumed(settings, {}, {});
    resumed.set_applied_steps(3);
    for (int step = 3; step < 6; ++step) {
      const auto grad = gradient(100, step, Dtype::BF16);
      resumed.begin_step();
      resumed.update(span_of(shard, grad, Dtype::BF16, Dtype::BF16, 0, 100), 1);
      resumed.end_step();
    }
    EXPECT_EQ(shard, whole) << name;
  }
}

TEST(ShardedOptimizer, OneCycleSetsBeta1) {
  config::ScheduleSettings cycle;
  cycle.type = config::ScheduleType::OneCycle;
  cycle.cycle_min_lr = {1e-3};
  cycle.cycle_max_lr = {5e-3};
  cycle.cycle_first_step_size = 2;
  cycle.cycle_min_mom = {0.3};
  for (const auto type : {OptimizerType::AdamW, OptimizerType::Lion, OptimizerType::Adagrad}) {
    const auto settings = adam(type);
    ShardedOptimizer optimizer(settings, cycle, {});
    const Schedule schedule(cycle, {1});
    auto shard = new_shard(optimizer, 50, Dtype::F32), wanted = shard;
    test::RuleModel model{settings};
    for (int step = 0; step < 6; ++step) {
      const auto grad = gradient(50, step, Dtype::F32);
      optimizer.begin_step();
      auto span = span_of(shard, grad, Dtype::F32, Dtype::F32, 0, 50);
      span.parameter = nullptr;
      optimizer.update(span, 1);
      optimizer.end_step();
      ++model.count;
      model.s.lr = schedule.rate(0, step);
      model.s.beta1 = *schedule.momentum(0, step);
      const auto* g = reinterpret_cast<const float*>(grad.data());
      float none = 0;
      for (std::size_t i = 0; i < 50; ++i)
        model.update(wanted.master[i], wanted.slots[0][i], type == OptimizerType::AdamW ? wanted.slots[1][i] : none,
                     none, g[i]);
    }
    EXPECT_EQ(shard, wanted);
  }
}

TEST(ShardedOptimizer, ConfigurationErrors) {
  EXPECT_THROW(ShardedOptimizer({}, {}, {}), ConfigError);
  EXPECT_THROW(ShardedOptimizer(adam(), warmup(), {{"*.bias", 1e-4, {}}}),
               ConfigError);  // the schedule would override it
  EXPECT_NO_THROW(ShardedOptimizer(adam(), warmup(), {{"*.bias", {}, 0.0}}));
  auto own_rates = warmup();
  own_rates.warmup_max_lr = {};
  ShardedOptimizer optimizer(adam(), own_rates, {{"*.bias", 1e-4, {}}});
  optimizer.set_applied_steps(4);
  EXPECT_EQ(optimizer.lr(1), 1e-4);
  try {
    optimizer.set_applied_steps(-1);
    ADD_FAILURE() << "a negative count was taken";
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.code(), ExitCode::kCheckpoint);
  }
}

TEST(ShardedOptimizer, ContractViolationsAreInternalErrors) {
  ShardedOptimizer optimizer(adam(), {}, {});
  auto shard = new_shard(optimizer, 8, Dtype::F32);
  const std::vector<char> grad(32);
  const auto good = span_of(shard, grad, Dtype::F32, Dtype::F32, 0, 8);
  EXPECT_THROW(optimizer.update(good, 1), InternalError);  // no begin_step
  EXPECT_THROW(optimizer.end_step(), InternalError);
  optimizer.begin_step();
  EXPECT_NO_THROW(optimizer.update(good, 1));
  auto bad = good;
  bad.parameter_group = 1;
  EXPECT_THROW(optimizer.update(bad, 1), InternalError);
  bad = good;
  bad.slots[1] = nullptr;
  EXPECT_THROW(optimizer.update(bad, 1), InternalError);
  bad = good;
  bad.numel = -1;
  EXPECT_THROW(optimizer.update(bad, 1), InternalError);
  bad = good;
  bad.parameter = bad.master;
  bad.parameter_dtype = Dtype::BF16;
  EXPECT_THROW(optimizer.update(bad, 1), InternalError);
  optimizer.end_step();
  EXPECT_THROW(optimizer.end_step(), InternalError);
}

}  // namespace
}  // namespace zero::optim::optimizer_test
