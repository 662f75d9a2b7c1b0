// The update rules for single elements (update_reference.h). Constants are computed in fp64 and rounded to fp32 once
// per update, as in torch's fused kernels. Build with -ffp-contract=off.
#include "optim/update_reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace zero::optim {
namespace {

constexpr double kRate = 1e-3, kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-8, kDecay = 0.1, kMomentum = 0.9;

float narrow(double value) { return static_cast<float>(value); }

// Update number `count` of one element; a and b are its states.
using Update = void (*)(float& p, float& a, float& b, float g, double count);

// Kingma and Ba (1412.6980) with Loshchilov and Hutter's decay (1711.05101), or with the L2 term.
template <bool kDecoupled>
void adam(float& p, float& m, float& v, float g, double count) {
  if (kDecoupled)
    p *= narrow(1 - kRate * kDecay);
  else
    g = std::fma(p, narrow(kDecay), g);
  m = std::fma(narrow(1 - kBeta1), g - m, m);
  v = std::fma(narrow(1 - kBeta2) * g, g, v * narrow(kBeta2));
  const float root = std::sqrt(v) / narrow(std::sqrt(1 - std::pow(kBeta2, count))) + narrow(kEps);
  p += (narrow(-(kRate / (1 - std::pow(kBeta1, count)))) * m) / root;
}

void sgd(float& p, float& buffer, float&, float g, double count) {
  g = std::fma(p, narrow(kDecay), g);
  buffer = count == 1 ? g : std::fma(g, 1.0f, buffer * narrow(kMomentum));
  p = std::fma(buffer, narrow(-kRate), p);
}

// Duchi et al., JMLR 12 (2011).
void adagrad(float& p, float& sum, float&, float g, double) {
  g = std::fma(p, narrow(kDecay), g);
  sum = std::fma(g, g, sum);
  p += (narrow(-kRate) * g) / (std::sqrt(sum) + narrow(kEps));
}

// Chen et al., 2302.06675.
void lion(float& p, float& m, float&, float g, double) {
  const float u = std::fma(narrow(1 - kBeta1), g, m * narrow(kBeta1));
  p = p * narrow(1 - kRate * kDecay) + (u > 0 ? narrow(-kRate) : u < 0 ? narrow(kRate) : u);
  m = std::fma(narrow(1 - kBeta2), g, m * narrow(kBeta2));
}

struct Rule {
  const char *name, *type, *more;
  int states;
  Update update;
};
constexpr Rule kRules[] = {
    {"adamw", "AdamW", R"(, "betas": [0.9, 0.95], "eps": 1e-8)", 2, adam<true>},
    {"adam", "Adam", R"(, "betas": [0.9, 0.95], "eps": 1e-8, "adam_w_mode": false)", 2, adam<false>},
    {"sgd", "SGD", R"(, "momentum": 0.9)", 1, sgd},
    {"adagrad", "Adagrad", R"(, "eps": 1e-8)", 1, adagrad},
    {"lion", "Lion", R"(, "betas": [0.9, 0.95])", 1, lion},
};

const Rule& rule_of(const std::string& name) {
  for (const auto& rule : kRules)
    if (name == rule.name) return rule;
  throw std::invalid_argument("no rule " + name);
}

}  // namespace

const std::vector<std::string>& update_rules() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const auto& rule : kRules) all.emplace_back(rule.name);
    return all;
  }();
  return names;
}

std::string update_configuration(const std::string& name) {
  const auto& rule = rule_of(name);
  return std::string(R"({"optimizer": {"type": ")") + rule.type + R"(", "params": {"lr": 1e-3, "weight_decay": 0.1)" +
         rule.more + "}}}";
}

UpdateValues reference_update(const std::string& name, std::vector<float> master, const std::vector<float>& gradient,
                              float factor, std::int64_t steps) {
  const auto& rule = rule_of(name);
  const auto kept = static_cast<std::size_t>(rule.states);
  UpdateValues values{std::move(master), std::vector<std::vector<float>>(kept)};
  for (auto& state : values.states) state.resize(values.master.size());
  for (std::size_t i = 0; i < values.master.size(); ++i) {
    float states[2] = {};
    for (std::int64_t step = 1; step <= steps; ++step)
      rule.update(values.master[i], states[0], states[1], gradient[i] * factor, static_cast<double>(step));
    for (std::size_t k = 0; k < kept; ++k) values.states[k][i] = states[k];
  }
  return values;
}

std::int64_t first_difference(const void* got, const void* expected, std::int64_t elements, std::int64_t period,
                              std::int64_t width) {
  const auto* bytes = static_cast<const char*>(got);
  const auto* wanted = static_cast<const char*>(expected);
  for (std::int64_t begin = 0; begin < elements; begin += period) {
    const auto count = std::min(period, elements - begin);
    const auto* row = bytes + begin * width;
    if (std::memcmp(row, wanted, static_cast<std::size_t>(count * width)) == 0) continue;
    std::int64_t i = 0;
    while (std::memcmp(row + i * width, wanted + i * width, static_cast<std::size_t>(width)) == 0) ++i;
    return begin + i;
  }
  return -1;
}

}  // namespace zero::optim
