// See muon_rule.h.
#include "engine/muon_rule.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "config/optimizers.h"
#include "optim/owners.h"

namespace zero::engine {
namespace {

// Newton-Schulz towards the nearest matrix whose singular values are one.
at::Tensor orthogonal(const at::Tensor& moved, std::int64_t steps, at::ScalarType products) {
  constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;  // Muon's
  auto x = moved.to(products);
  const bool tall = x.size(0) > x.size(1);
  if (tall) x = x.t();
  x = x.div(x.norm().clamp_min(1e-7));
  for (std::int64_t step = 0; step < steps; ++step) {
    const auto gram = x.mm(x.t());
    x = at::addmm(x, at::addmm(gram, gram, gram, kB, kC), x, kA);
  }
  return (tall ? x.t() : x).to(moved.scalar_type());
}

}  // namespace

MuonRule::MuonRule(std::set<std::string> matrices, const optim::ShardedOptimizer& optimizer)
    : matrices_(std::move(matrices)), optimizer_(optimizer) {}

std::vector<std::string> MuonRule::states(const std::string& parameter, const std::vector<std::int64_t>&) const {
  return config::states_of(optimizer_.numbers(0), matrices_.contains(parameter));
}

UpdateRule::Scope MuonRule::scope(const std::string& parameter, const std::vector<std::int64_t>&) const {
  return matrices_.contains(parameter) ? Scope::Whole : Scope::Elements;
}

double MuonRule::cost(const std::string&, const std::vector<std::int64_t>& shape) const {
  return optim::muon_cost(shape);
}

void MuonRule::update(std::span<UpdatePiece> pieces) {
  for (auto& piece : pieces) {
    const auto& own = optimizer_.numbers(piece.group);
    auto& mean = piece.states[0];
    mean.lerp_(piece.gradient, 1 - own.momentum);
    // More than two dimensions count as one row for each entry of the first.
    const auto moved = (own.nesterov ? piece.gradient.lerp(mean, own.momentum) : mean).reshape({mean.size(0), -1});
    const auto rows = static_cast<double>(moved.size(0)), columns = static_cast<double>(moved.size(1));
    const double scale = own.ns_match_rms ? 0.2 * std::sqrt(std::max(rows, columns))
                                          : std::sqrt(std::max(1.0, rows / std::max(columns, 1.0)));
    const auto direction = orthogonal(moved, own.ns_steps, own.ns_fp32 ? at::kFloat : at::kBFloat16);
    piece.master.mul_(1 - piece.lr * own.weight_decay);
    piece.master.add_(direction.view_as(piece.master), -piece.lr * scale);
  }
}

}  // namespace zero::engine
