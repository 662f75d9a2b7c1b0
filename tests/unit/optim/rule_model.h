// The update rules for one element, in the order of operations of docs/numerics.md, without libzero's kernels. Build
// with -ffp-contract=off.
#pragma once
#include <cmath>

#include "config/settings.h"

namespace zero::test {

// Updates one element; m, v and third are its states. count: of updates, with this one.
struct RuleModel {
  using OptimizerType = config::OptimizerType;
  config::OptimizerSettings s;
  int count = 0;
  void update(float& p, float& m, float& v, float& third, float g) const {
    const double lr = s.lr, wd = s.weight_decay;
    const bool bias = s.bias_correction;
    const bool adam = s.type == OptimizerType::AdamW || s.type == OptimizerType::Adam;
    const bool decoupled = s.type == OptimizerType::AdamW || (s.type == OptimizerType::Adam && s.adam_w_mode);
    if (adam) {
      const double ss = lr / (bias ? 1 - std::pow(s.beta1, count) : 1);
      const auto q = static_cast<float>(std::sqrt(bias ? 1 - std::pow(s.beta2, count) : 1));
      const auto c1 = static_cast<float>(1 - s.beta1), c2 = static_cast<float>(1 - s.beta2);
      if (decoupled)
        p = p * static_cast<float>(1 - lr * wd);
      else if (wd != 0)
        g = std::fma(p, static_cast<float>(wd), g);
      m = c1 < 0.5f ? std::fma(c1, g - m, m) : std::fma(c1 - 1, g - m, g);
      v = std::fma(c2 * g, g, v * static_cast<float>(s.beta2));
      if (s.amsgrad) third = third > v ? third : v;
      const float den = std::sqrt(s.amsgrad ? third : v) / q + static_cast<float>(s.eps);
      p = p + (static_cast<float>(-ss) * m) / den;
    } else if (s.type == OptimizerType::Sgd) {
      if (wd != 0) g = std::fma(p, static_cast<float>(wd), g);
      if (s.momentum != 0) {
        const auto mu = static_cast<float>(s.momentum);
        m = count == 1 ? g : std::fma(g, static_cast<float>(1 - s.dampening), m * mu);
        g = s.nesterov ? std::fma(m, mu, g) : m;
      }
      p = std::fma(g, static_cast<float>(-lr), p);
    } else if (s.type == OptimizerType::Adagrad) {
      if (wd != 0) g = std::fma(p, static_cast<float>(wd), g);
      m = std::fma(g, g, m);
      p = p +
          (static_cast<float>(-(lr / (1 + (count - 1) * s.lr_decay))) * g) / (std::sqrt(m) + static_cast<float>(s.eps));
    } else if (s.type == OptimizerType::Lion) {
      const float u = std::fma(static_cast<float>(1 - s.beta1), g, m * static_cast<float>(s.beta1));
      const auto rate = static_cast<float>(lr);
      p = p * static_cast<float>(1 - lr * wd) + (u > 0 ? -rate : u < 0 ? rate : u);
      m = std::fma(static_cast<float>(1 - s.beta2), g, m * static_cast<float>(s.beta2));
    } else {
      update_by_torchs_other_rules(p, m, v, third, g);
    }
  }

  static float lerp(float m, float g, double weight) {
    const auto w = static_cast<float>(weight);
    return w < 0.5f ? std::fma(w, g - m, m) : std::fma(w - 1, g - m, g);
  }
  static float mean_of_squares(float v, float g, double decay) {
    return std::fma(static_cast<float>(1 - decay) * g, g, v * static_cast<float>(decay));
  }
  void update_by_torchs_other_rules(float& p, float& a, float& b, float& c, float g) const {
    const auto eps = static_cast<float>(s.eps), rate = static_cast<float>(-s.lr);
    const auto first = 1 - std::pow(s.beta1, count), second = 1 - std::pow(s.beta2, count);
    if (s.weight_decay != 0 && s.decoupled_weight_decay)
      p = p * static_cast<float>(1 - s.lr * s.weight_decay);
    else if (s.weight_decay != 0)
      g = std::fma(p, static_cast<float>(s.weight_decay), g);
    if (s.type == OptimizerType::RmsProp) {
      a = mean_of_squares(a, g, s.alpha);
      float variance = a;
      if (s.centered) {
        float& mean = s.momentum != 0 ? c : b;
        mean = lerp(mean, g, 1 - s.alpha);
        variance = std::fma(-mean, mean, a);
      }
      float step = g / (std::sqrt(variance) + eps);
      if (s.momentum != 0) step = b = std::fma(b, static_cast<float>(s.momentum), step);
      p = std::fma(step, rate, p);
    } else if (s.type == OptimizerType::Adadelta) {
      a = mean_of_squares(a, g, s.rho);
      const float step = std::sqrt(b + eps) / std::sqrt(a + eps) * g;
      b = mean_of_squares(b, step, s.rho);
      p = std::fma(step, rate, p);
    } else if (s.type == OptimizerType::Adamax) {
      a = lerp(a, g, 1 - s.beta1);
      const float decayed = b * static_cast<float>(s.beta2), now = std::fabs(g) + eps;
      b = decayed > now ? decayed : now;
      p = p + (static_cast<float>(-(s.lr / first)) * a) / b;
    } else {
      a = lerp(a, g, 1 - s.beta1);
      b = mean_of_squares(b, g, s.beta2);
      if (s.type == OptimizerType::NAdam) {
        const auto mu = [&](int t) { return s.beta1 * (1 - 0.5 * std::pow(0.96, t * s.momentum_decay)); };
        double product = 1;
        for (int t = 1; t <= count; ++t) product *= mu(t);
        const float root = std::sqrt(b / static_cast<float>(second)) + eps;
        p = p + (static_cast<float>(-(s.lr * (1 - mu(count)) / (1 - product))) * g) / root;
        p = p + (static_cast<float>(-(s.lr * mu(count + 1) / (1 - product * mu(count + 1)))) * a) / root;
      } else {
        const double longest = 2 / (1 - s.beta2) - 1, t = count;
        const double length = longest - 2 * t * std::pow(s.beta2, t) / second;
        if (length > 5) {
          const double rectify =
              std::sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length));
          p = p + (static_cast<float>(-(s.lr / first * (rectify * std::sqrt(second)))) * a) / (std::sqrt(b) + eps);
        } else {
          p = p + static_cast<float>(-(s.lr / first)) * a;
        }
      }
    }
  }
};

}  // namespace zero::test
