// See gate.h.
#include "parallel/gate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace zero::parallel {
namespace {

using Tokens = std::vector<std::int64_t>;

// As torch.distributions.Gumbel(0, 1).
at::Tensor gumbel(at::IntArrayRef sizes) {
  constexpr float tiny = std::numeric_limits<float>::min(), eps = std::numeric_limits<float>::epsilon();
  const auto uniform = at::rand(sizes, at::kFloat) * ((1 - eps) - tiny) + tiny;
  return -(-uniform.log()).log();
}

// The first of the largest of n values; `without`: not this one.
std::int64_t largest(const float* values, std::int64_t n, std::int64_t without = -1) {
  std::int64_t best = -1;
  for (std::int64_t i = 0; i < n; ++i)
    if (i != without && (best < 0 || values[i] > values[best])) best = i;
  return best;
}

// The experts of every token, and how they are kept.
class Router {
 public:
  Router(const at::Tensor& logits, const at::Tensor& gates, const GateOptions& options, const at::Tensor& used)
      : options_(options), tokens_(gates.size(0)), experts_(options.experts) {
    const auto on_host = [](const at::Tensor& values) { return values.detach().to(at::kCPU, at::kFloat).contiguous(); };
    logits_ = on_host(logits);
    gates_ = on_host(gates);
    if (used.defined()) used_ = used.detach().to(at::kCPU).ne(0).contiguous();
    const auto room = capacity(tokens_, experts_, options.capacity_factor, options.k, options.min_capacity);
    room_ = options.drop_tokens ? room : std::numeric_limits<std::int64_t>::max();
    chosen_.assign(static_cast<std::size_t>(tokens_ * options.k), -1);
    by_expert_.resize(static_cast<std::size_t>(experts_));
  }

  Routing run() {
    Routing routing;
    routing.chosen.assign(by_expert_.size(), 0);
    if (options_.k == 1)
      choose_one();
    else if (options_.k == 2)
      choose_two();
    else
      choose_many();
    routing.balanced = balanced_;
    for (const auto expert : chosen_)
      if (expert >= 0) ++routing.chosen[static_cast<std::size_t>(expert)];
    place(routing);
    return routing;
  }

 private:
  const float* gates(std::int64_t token) const { return gates_.const_data_ptr<float>() + token * experts_; }
  bool used(std::int64_t token) const { return !used_.defined() || used_.const_data_ptr<bool>()[token]; }
  void choose(std::int64_t token, std::int64_t choice, std::int64_t expert) {
    chosen_[static_cast<std::size_t>(token * options_.k + choice)] = expert;
  }
  // Choices (token * k + choice) of an expert, in the order in which they are kept.
  Tokens& of_expert(std::int64_t expert) { return by_expert_[static_cast<std::size_t>(expert)]; }
  void list(std::int64_t choice) {
    for (std::int64_t s = 0; s < tokens_; ++s) {
      const auto at = s * options_.k + choice;
      if (const auto expert = chosen_[static_cast<std::size_t>(at)]; expert >= 0) of_expert(expert).push_back(at);
    }
  }
  void count_balanced() {
    balanced_.clear();
    for (const auto& choices : by_expert_) balanced_.push_back(static_cast<std::int64_t>(choices.size()));
  }
  // Keeps the `room_` choices of every expert with the largest scores, the first ones of equal scores.
  template <class Score>
  void keep_largest(const Score& score) {
    for (std::int64_t e = 0; e < experts_; ++e) {
      auto& choices = of_expert(e);
      if (static_cast<std::int64_t>(choices.size()) <= room_) continue;
      std::stable_sort(choices.begin(), choices.end(), [&](std::int64_t a, std::int64_t b) {
        return score(a / options_.k, e) > score(b / options_.k, e);
      });
      choices.resize(static_cast<std::size_t>(room_));
      std::sort(choices.begin(), choices.end());
    }
  }
  void keep_first() {
    for (auto& choices : by_expert_)
      if (static_cast<std::int64_t>(choices.size()) > room_) choices.resize(static_cast<std::size_t>(room_));
  }

  void choose_one() {
    const auto scores = options_.training && options_.noisy_logits ? logits_ + gumbel(logits_.sizes()) : gates_;
    const auto* const data = scores.const_data_ptr<float>();
    for (std::int64_t s = 0; s < tokens_; ++s)
      if (used(s)) choose(s, 0, largest(data + s * experts_, experts_));
    list(0);
    count_balanced();
    if (!options_.training || !options_.random_selection) return keep_first();
    const auto random = at::rand({tokens_, experts_}, at::kFloat);  // also where nothing is dropped, as DeepSpeed
    keep_largest([values = random.const_data_ptr<float>(), this](std::int64_t token, std::int64_t expert) {
      return values[token * experts_ + expert];
    });
  }

  void choose_two() {
    const auto noisy = options_.training && options_.second_sampling ? logits_ + gumbel(logits_.sizes()) : logits_;
    const auto* const data = noisy.const_data_ptr<float>();
    for (std::int64_t s = 0; s < tokens_; ++s) {
      if (!used(s)) continue;
      const auto first = largest(gates(s), experts_);
      choose(s, 0, first);
      choose(s, 1, largest(data + s * experts_, experts_, first));
    }
    list(0);
    count_balanced();  // of first choices only
    list(1);
    keep_first();
  }

  void choose_many() {
    Tokens order(static_cast<std::size_t>(experts_));
    for (std::int64_t s = 0; s < tokens_; ++s) {
      if (!used(s)) continue;
      std::iota(order.begin(), order.end(), 0);
      const auto* const gate = gates(s);
      std::partial_sort(order.begin(), order.begin() + options_.k, order.end(),
                        [&](std::int64_t a, std::int64_t b) { return gate[a] != gate[b] ? gate[a] > gate[b] : a < b; });
      for (std::int64_t c = 0; c < options_.k; ++c) choose(s, c, order[static_cast<std::size_t>(c)]);
    }
    for (std::int64_t s = 0; s < tokens_; ++s)
      for (std::int64_t c = 0; c < options_.k; ++c) {
        const auto at = s * options_.k + c;
        if (const auto expert = chosen_[static_cast<std::size_t>(at)]; expert >= 0) of_expert(expert).push_back(at);
      }
    count_balanced();
    if (options_.keep_likeliest)
      keep_largest([this](std::int64_t token, std::int64_t expert) { return gates(token)[expert]; });
    else
      keep_first();
  }

  void place(Routing& routing) const {
    std::int64_t rows = 0;
    for (const auto& choices : by_expert_) {
      routing.kept.push_back(static_cast<std::int64_t>(choices.size()));
      rows += routing.kept.back();
    }
    routing.place = at::full({tokens_, options_.k}, -1, at::kInt);
    routing.expert = at::zeros({tokens_, options_.k}, at::kInt);
    routing.choice_of_row = at::empty({rows}, at::kInt);
    auto* const place = routing.place.mutable_data_ptr<std::int32_t>();
    auto* const expert = routing.expert.mutable_data_ptr<std::int32_t>();
    auto* const choice_of = routing.choice_of_row.mutable_data_ptr<std::int32_t>();
    std::int32_t row = 0;
    for (std::size_t e = 0; e < by_expert_.size(); ++e)
      for (const auto choice : by_expert_[e]) {
        place[choice] = row;
        expert[choice] = static_cast<std::int32_t>(e);
        choice_of[row++] = static_cast<std::int32_t>(choice);
      }
  }

  const GateOptions& options_;
  const std::int64_t tokens_, experts_;
  std::int64_t room_ = 0;
  at::Tensor logits_, gates_, used_;
  Tokens chosen_;                  // [tokens, k]: experts, -1: none
  std::vector<Tokens> by_expert_;  // kept choices
  std::vector<std::int64_t> balanced_;
};

at::Tensor kept_of(const Routing& routing, const at::Tensor& like) {
  return routing.place.ge(0).to(like.device(), like.scalar_type());
}

}  // namespace

Routing route(const at::Tensor& logits, const at::Tensor& gates, const GateOptions& options,
              const at::Tensor& used_token) {
  const at::NoGradGuard no_grad;
  return Router(logits, gates, options, used_token).run();
}

at::Tensor choice_weights(const at::Tensor& gates, const Routing& routing, const GateOptions& options) {
  const auto kept = gates.gather(1, routing.expert.to(gates.device(), at::kLong)) * kept_of(routing, gates);
  if (options.k == 1) return kept;
  return kept / kept.sum(1, /*keepdim=*/true).clamp_min(std::numeric_limits<float>::epsilon());
}

at::Tensor auxiliary_loss(const at::Tensor& gates, const Routing& routing, const GateOptions& options) {
  const auto tokens = gates.size(0);
  if (tokens == 0) return gates.sum() * 0;  // with a gradient, as on other ranks
  const auto share = at::tensor(routing.balanced, gates.options().dtype(at::kDouble).device(at::kCPU))
                         .div(static_cast<double>(tokens))
                         .to(gates.options());
  const auto scale = static_cast<double>(options.experts) / (options.k > 2 ? static_cast<double>(options.k) : 1);
  return (gates.mean(0) * share).sum() * scale;
}

at::Tensor jitter(at::IntArrayRef sizes, at::TensorOptions options) {
  constexpr float low = 0.99F, high = 1.01F;
  return (at::rand(sizes, at::kFloat) * (high - low) + low).to(options);
}

}  // namespace zero::parallel
