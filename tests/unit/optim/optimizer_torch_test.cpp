// libzero's update rules compared with torch's fused CPU kernels, which have the same order of operations: bitwise in
// every element except the last (numel mod 8) of a tensor, where torch's compiler fuses differently. Skipped if torch
// runs without SIMD, because nothing is fused there.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <omp.h>
#include <torch/types.h>

#include <bit>
#include <cmath>

#include <ATen/Version.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>

#include "optim/sharded_optimizer.h"

namespace zero::optim::optimizer_torch_test {
namespace {

using config::OptimizerSettings;
using config::OptimizerType;

// One tensor with its states, updated by torch and by libzero.
struct Twin {
  at::Tensor p, m, v, step, gradient;
  explicit Twin(std::int64_t numel, float slot = 0)
      : p(torch::randn({numel})),
        m(torch::full({numel}, slot)),
        v(torch::full({numel}, slot)),
        step(torch::zeros({}, torch::kFloat)) {}
  Twin clone() const {
    Twin other(0);
    other.p = p.clone(), other.m = m.clone(), other.v = v.clone(), other.step = step.clone();
    return other;
  }

  void update_torch(const OptimizerSettings& s, bool decoupled) {
    step += 1;
    switch (s.type) {
      case OptimizerType::Adam:
      case OptimizerType::AdamW:
        if (decoupled)
          at::_fused_adamw_({p}, {gradient}, {m}, {v}, {}, {step}, s.lr, s.beta1, s.beta2, s.weight_decay, s.eps, false,
                            false, {}, {});
        else
          at::_fused_adam_({p}, {gradient}, {m}, {v}, {}, {step}, s.lr, s.beta1, s.beta2, s.weight_decay, s.eps, false,
                           false, {}, {});
        break;
      case OptimizerType::Sgd: {
        std::vector<at::Tensor> buffers;
        if (s.momentum != 0) buffers.push_back(m);
        at::_fused_sgd_({p}, {gradient}, buffers, s.weight_decay, s.momentum, s.lr, s.dampening, s.nesterov, false,
                        step.item<float>() == 1, {}, {});
        break;
      }
      case OptimizerType::Adagrad:
        at::_fused_adagrad_({p}, {gradient}, {m}, {step}, s.lr, s.lr_decay, s.weight_decay, s.eps, false, {}, {});
        break;
      default:
        FAIL() << "torch has no such kernel";
    }
  }

  void update_ours(ShardedOptimizer& optimizer) {
    optimizer.begin_step();
    Span span;
    span.master = p.data_ptr<float>();
    span.slots[0] = m.data_ptr<float>();
    span.slots[1] = v.data_ptr<float>();
    span.gradient = gradient.const_data_ptr();
    span.parameter = span.master;
    span.numel = p.numel();
    optimizer.update(span, 1);
    optimizer.end_step();
  }
};

OptimizerSettings settings_of(OptimizerType type) {
  OptimizerSettings s;
  s.type = type;
  s.lr = 1e-2;
  s.weight_decay = 0.1;
  return s;
}

class AgainstTorch : public testing::Test {
 protected:
  void SetUp() override {
    if (at::get_cpu_capability() == "DEFAULT") GTEST_SKIP() << "torch runs without SIMD here";
    torch::manual_seed(5);
  }
  void TearDown() override { set_threads(threads_); }
  static void set_threads(int threads) {
    at::set_num_threads(threads);
    omp_set_num_threads(threads);
  }

  // 20 steps with new gradients; bits of parameter and states after each.
  static void expect_same_bits(const OptimizerSettings& settings, std::int64_t numel, int threads) {
    const bool decoupled =
        settings.type == OptimizerType::AdamW || (settings.type == OptimizerType::Adam && settings.adam_w_mode);
    set_threads(threads);
    ShardedOptimizer optimizer(settings, {}, {});
    Twin theirs(numel, optimizer.slot_initial_value());
    auto ours = theirs.clone();
    for (int step = 1; step <= 20; ++step) {
      ours.gradient = torch::randn({numel}) * 0.1;
      theirs.gradient = ours.gradient.clone();
      theirs.update_torch(settings, decoupled);
      ours.update_ours(optimizer);
      ASSERT_TRUE(torch::equal(ours.p, theirs.p) && torch::equal(ours.m, theirs.m) && torch::equal(ours.v, theirs.v))
          << numel << " elements, " << threads << " threads, step " << step << ": "
          << (ours.p != theirs.p).sum().item<std::int64_t>() << " parameters differ, "
          << (ours.m != theirs.m).sum().item<std::int64_t>() << " first and "
          << (ours.v != theirs.v).sum().item<std::int64_t>() << " second states";
    }
  }
  static void expect_same_bits(const OptimizerSettings& settings) {
    for (const std::int64_t numel : {16, 48, 4096, 100000, (1 << 20) + 16 * 1001})
      for (const int threads : {1, 2}) {
        expect_same_bits(settings, numel, threads);
        if (HasFatalFailure()) return;
      }
  }

 private:
  const int threads_ = at::get_num_threads();
};

TEST_F(AgainstTorch, AdamW) { expect_same_bits(settings_of(OptimizerType::AdamW)); }

TEST_F(AgainstTorch, AdamWWithoutDecayAndWithOtherBetas) {
  auto s = settings_of(OptimizerType::AdamW);
  s.weight_decay = 0;
  s.beta2 = 0.95;
  s.eps = 1e-6;
  expect_same_bits(s);
  s.beta1 = 0.4;  // 1 - beta1 above a half: torch interpolates from the other end
  expect_same_bits(s, 4096, 1);
  s.beta1 = 0.5;
  expect_same_bits(s, 4096, 1);
}

TEST_F(AgainstTorch, AdamIsAdamWUnlessToldOtherwise) { expect_same_bits(settings_of(OptimizerType::Adam), 4096, 2); }

TEST_F(AgainstTorch, AdamWithL2) {
  auto s = settings_of(OptimizerType::Adam);
  s.adam_w_mode = false;
  expect_same_bits(s);
  s.weight_decay = 0;
  expect_same_bits(s, 4096, 2);
}

TEST_F(AgainstTorch, Sgd) {
  for (const double decay : {0.0, 0.1})
    for (const double momentum : {0.0, 0.9})
      for (const double dampening : {0.0, 0.4})
        for (const bool nesterov : {false, true}) {
          if ((nesterov && (momentum == 0 || dampening != 0)) || (momentum == 0 && dampening != 0)) continue;
          auto s = settings_of(OptimizerType::Sgd);
          s.weight_decay = decay, s.momentum = momentum, s.dampening = dampening, s.nesterov = nesterov;
          SCOPED_TRACE(testing::Message() << "decay " << decay << ", momentum " << momentum << ", dampening "
                                          << dampening << (nesterov ? ", nesterov" : ""));
          for (const std::int64_t numel : {16, 4096, 100000})
            for (const int threads : {1, 2}) expect_same_bits(s, numel, threads);
        }
}

TEST_F(AgainstTorch, Adagrad) {
  auto s = settings_of(OptimizerType::Adagrad);
  s.eps = 1e-10;
  s.lr_decay = 0.1;
  expect_same_bits(s);
  s.weight_decay = 0;
  s.initial_accumulator_value = 0.1;
  expect_same_bits(s, 4096, 2);
}

std::int64_t ulps(float a, float b) {
  const auto ordered = [](float x) {
    const auto bits = std::bit_cast<std::int32_t>(x);
    return static_cast<std::int64_t>(
        bits < 0 ? std::numeric_limits<std::int32_t>::min() - static_cast<std::int64_t>(bits) : bits);
  };
  return std::abs(ordered(a) - ordered(b));
}

// One update from the same state: torch's tail fuses the other product of v.
TEST_F(AgainstTorch, AdamWTailsDifferByTorchsContractionOnly) {
  const auto s = settings_of(OptimizerType::AdamW);
  for (const std::int64_t numel : {1, 7, 9, 17, 31, 1001, 100001, 100003, 100007}) {
    set_threads(1);
    Twin theirs(numel);
    ShardedOptimizer optimizer(s, {}, {});
    for (int step = 1; step <= 20; ++step) {
      auto ours = theirs.clone();
      ours.gradient = torch::randn({numel}) * 0.1;
      theirs.gradient = ours.gradient.clone();
      theirs.update_torch(s, true);
      ours.update_ours(optimizer);
      const auto body = numel - numel % 8;
      ASSERT_TRUE(torch::equal(ours.p.slice(0, 0, body), theirs.p.slice(0, 0, body))) << numel;
      ASSERT_TRUE(torch::equal(ours.v.slice(0, 0, body), theirs.v.slice(0, 0, body))) << numel;
      ASSERT_TRUE(torch::equal(ours.m, theirs.m)) << numel;
      for (auto i = body; i < numel; ++i) {
        ASSERT_LE(ulps(ours.v.const_data_ptr<float>()[i], theirs.v.const_data_ptr<float>()[i]), 1) << numel << " " << i;
        ASSERT_LE(ulps(ours.p.const_data_ptr<float>()[i], theirs.p.const_data_ptr<float>()[i]), 2) << numel << " " << i;
      }
    }
  }
}

}  // namespace
}  // namespace zero::optim::optimizer_torch_test
