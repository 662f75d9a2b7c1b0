// torch_hooks/interception.h: the operators that are intercepted and their tags, those that are not, refused writes,
// and the calls after an operator.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <zero/errors.h>
#include <zero/read_scope.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "torch_hooks/interception.h"
#include "torch_hooks/storage_access.h"

namespace zero::torch_hooks::interception_test {
namespace {

struct Call {
  std::string op;
  std::vector<int> tags;
  bool operator==(const Call&) const = default;
};

class Listener final : public UseListener {
 public:
  void before_use(const int* tags, int count, const char* op) override {
    std::lock_guard lock(mutex);
    used.push_back({op, std::vector<int>(tags, tags + count)});
    for (int i = 0; i < count; ++i) ++open;
    if (throws) {
      open -= count;
      throw std::runtime_error("the listener's");
    }
    if (make) make();
  }
  void after_use(const int* tags, int count) noexcept override {
    std::lock_guard lock(mutex);
    ended.push_back(std::vector<int>(tags, tags + count));
    open -= count;
  }
  bool before_write(int tag, const char* op) override {
    std::lock_guard lock(mutex);
    written.push_back({op, {tag}});
    return writes;
  }
  // The tags of the only operator that was intercepted since the last call.
  std::vector<int> one(const std::string& op) {
    const auto calls = std::exchange(used, {});
    EXPECT_EQ(calls.size(), 1u) << op;
    if (calls.empty()) return {};
    EXPECT_EQ(calls[0].op, op);
    auto tags = calls[0].tags;
    std::sort(tags.begin(), tags.end());
    return tags;
  }

  std::mutex mutex;
  std::vector<Call> used, written;
  std::vector<std::vector<int>> ended;
  int open = 0;
  bool writes = true, throws = false;
  std::function<void()> make;
};

class Interception : public testing::Test {
 protected:
  ~Interception() override {
    for (const auto& p : taken_) stop_intercepting(p, p.storage());
    EXPECT_EQ(listener_.open, 0) << "an after_use() for each before_use()";
  }
  at::Tensor parameter(at::IntArrayRef sizes, int tag) { return parameter(sizes, tag, listener_); }
  at::Tensor parameter(at::IntArrayRef sizes, int tag, Listener& listener) {
    auto p = at::ones(sizes).requires_grad_();
    intercept(p, &listener, tag);
    taken_.push_back(p);
    return p;
  }
  using Tags = std::vector<int>;
  Listener listener_;
  std::vector<at::Tensor> taken_;
};

TEST_F(Interception, OneCallForAllParametersOfAnOperator) {
  const auto weight = parameter({4, 3}, 7), bias = parameter({4}, 9);
  const auto x = at::ones({2, 3});
  at::linear(x, weight, bias);
  EXPECT_EQ(listener_.one("aten::linear"), (Tags{7, 9})) << "and none for the operators it is made of";
  at::add(x, x);
  EXPECT_TRUE(listener_.used.empty()) << "no parameter";
  EXPECT_EQ(listener_.ended.size(), 1u);
  at::mul(weight, weight);
  EXPECT_EQ(listener_.one("aten::mul"), (Tags{7, 7})) << "an argument is a use";
}

TEST_F(Interception, ParametersInListsAndOptionals) {
  const auto a = parameter({2}, 1), b = parameter({2}, 2), weight = parameter({3}, 3);
  at::cat({a, at::ones({2}), b});
  EXPECT_EQ(listener_.one("aten::cat"), (Tags{1, 2}));
  at::layer_norm(at::ones({2, 3}), {3}, weight, {});
  EXPECT_EQ(listener_.one("aten::layer_norm"), Tags{3});
  const auto index = at::zeros({1}, at::kLong);
  at::index(a, {index});
  EXPECT_EQ(listener_.one("aten::index"), Tags{1});
}

TEST_F(Interception, MoreThanSixtyFourParameters) {
  std::vector<at::Tensor> all;
  Tags expected;
  for (int tag = 0; tag < 200; ++tag) {
    all.push_back(parameter({2}, tag));
    expected.push_back(tag);
  }
  const auto sum = at::cat(all).sum();
  EXPECT_EQ(listener_.one("aten::cat"), expected);
  EXPECT_EQ(sum.item<float>(), 400);
}

TEST_F(Interception, ListenersHearOfTheirOwn) {
  Listener other;
  const auto mine = parameter({3}, 1), theirs = parameter({3}, 1, other), more = parameter({3}, 2);
  at::cat({mine, theirs, more});
  EXPECT_EQ(listener_.one("aten::cat"), (Tags{1, 2}));
  EXPECT_EQ(other.one("aten::cat"), Tags{1});
  EXPECT_EQ(other.open, 0);
}

TEST_F(Interception, ViewsAreLetThroughAndCaughtWhenTheyAreRead) {
  const auto weight = parameter({4, 6}, 5);
  const std::vector<at::Tensor> views = {weight.t(),
                                         weight.view({6, 4}),
                                         weight.select(0, 1),
                                         weight.slice(0, 1, 3),
                                         weight.narrow(1, 0, 2),
                                         weight.unsqueeze(0),
                                         weight.permute({1, 0}),
                                         weight.expand({2, 4, 6}),
                                         weight.detach(),
                                         weight.unbind(0)[2],
                                         weight.chunk(2)[1],
                                         weight.split(2)[0],
                                         weight.t().slice(0, 1, 2)};
  EXPECT_TRUE(listener_.used.empty()) << listener_.used[0].op;
  for (const auto& view : views) {
    view.sum();
    EXPECT_EQ(listener_.one("aten::sum"), Tags{5});
  }
}

// These operators may return a view or a copy, so they count as reads.
TEST_F(Interception, WhatMayCopyIsARead) {
  const auto weight = parameter({4, 6}, 5);
  weight.reshape({24});
  EXPECT_EQ(listener_.one("aten::reshape"), Tags{5});
  weight.t().contiguous();
  EXPECT_EQ(listener_.one("aten::contiguous"), Tags{5});
  weight.to(at::kDouble);
  EXPECT_EQ(listener_.used.size(), 1u);
  listener_.used.clear();
  weight.clone();
  EXPECT_EQ(listener_.one("aten::clone"), Tags{5});
}

TEST_F(Interception, SizesAndTypesAreNoUse) {
  const auto weight = parameter({4, 6}, 5);
  at::zeros_like(weight), at::empty_like(weight), at::rand_like(weight), weight.new_zeros({3}), weight.is_contiguous();
  weight.size(0), weight.numel(), weight.is_same_size(weight), at::result_type(weight, weight);
  EXPECT_TRUE(listener_.used.empty()) << listener_.used[0].op;
  EXPECT_TRUE(listener_.written.empty());
}

TEST_F(Interception, WritesAreAskedForAndMayBeLeftOut) {
  const at::NoGradGuard no_grad;
  const auto p = parameter({3}, 4);
  p.mul_(3);
  EXPECT_EQ(listener_.written, (std::vector<Call>{{"aten::mul_", {4}}}));
  EXPECT_EQ(listener_.one("aten::mul_"), Tags{4}) << "it reads, too";
  EXPECT_EQ(p.detach()[0].item<float>(), 3);
  listener_.used.clear(), listener_.written.clear();
  listener_.writes = false;
  const auto& same = p.add_(1);
  EXPECT_TRUE(same.is_same(p));
  EXPECT_TRUE(listener_.used.empty()) << "neither read nor written";
  EXPECT_EQ(listener_.written.size(), 1u);
  p.detach().fill_(9);  // through a view
  EXPECT_EQ(listener_.written.size(), 2u);
  auto out = parameter({3}, 6);
  at::add_out(out, at::ones({3}), at::ones({3}));
  EXPECT_EQ(listener_.written.back(), (Call{"aten::add", {6}}));
  listener_.writes = true;
  EXPECT_TRUE(torch::equal(p.detach(), at::full({3}, 3.f)));
  EXPECT_TRUE(torch::equal(out.detach(), at::ones({3})));
}

TEST_F(Interception, MetadataMayBeWrittenUnasked) {
  const auto p = parameter({3}, 4);
  p.requires_grad_(false);
  p.requires_grad_(true);
  EXPECT_TRUE(listener_.written.empty());
  EXPECT_TRUE(listener_.used.empty());
}

TEST_F(Interception, BackwardAndItsThreadsAreCaught) {
  const auto weight = parameter({4, 3}, 7);
  const auto x = at::ones({2, 3}).requires_grad_();
  const auto loss = at::linear(x, weight).sum();
  listener_.used.clear();
  loss.backward();
  ASSERT_FALSE(listener_.used.empty()) << "the gradient of x reads the weight";
  for (const auto& call : listener_.used) EXPECT_EQ(call.tags, Tags{7}) << call.op;
  EXPECT_TRUE(weight.grad().defined());
  listener_.used.clear();
  std::thread([&] { at::relu(weight); }).join();
  EXPECT_EQ(listener_.one("aten::relu"), Tags{7});
}

TEST_F(Interception, DataMayAppearJustInTime) {
  const auto p = parameter({3}, 1);
  const auto view = p.detach();
  release_storage(p.storage(), "not here");
  const auto buffer = at::full({3}, 8.f);
  listener_.make = [&] { gather_storage(p.storage(), buffer, 0); };
  EXPECT_EQ(view.sum().item<float>(), 24);
}

TEST_F(Interception, ExceptionsReachTheCallerAndEndTheUse) {
  const auto p = parameter({3}, 1);
  Listener other;
  const auto q = parameter({3}, 2, other);
  EXPECT_THROW(at::add(p, at::ones({4})), c10::Error) << "the operator's own";
  EXPECT_EQ(listener_.ended.size(), 1u);
  other.throws = true;
  EXPECT_THROW(at::add(p, q), std::runtime_error) << "the second listener's";
  EXPECT_EQ(listener_.ended.size(), 2u) << "the first had begun";
  EXPECT_TRUE(other.ended.empty()) << "the second had not";
  other.throws = false;
  EXPECT_EQ(at::add(p, q).sum().item<float>(), 6);
}

// zero/read_scope.h
TEST_F(Interception, AReadScopeIsOneOperator) {
  const auto a = parameter({3}, 1), b = parameter({3}, 2);
  const auto view = a.detach().view({3, 1});
  bool grad_mode = false;
  listener_.make = [&] { grad_mode = at::GradMode::is_enabled(); };
  const at::NoGradGuard as_inside_an_autograd_function;
  {
    const zero::ReadScope scope({at::ones({3}), view, b, at::Tensor()}, "a kernel", /*training=*/true);
    EXPECT_EQ(listener_.one("a kernel"), (Tags{1, 2}));
    EXPECT_TRUE(grad_mode);
    EXPECT_FALSE(at::GradMode::is_enabled()) << "afterwards as before";
    EXPECT_EQ(listener_.open, 2);
    const auto moved = zero::ReadScope({b}, "another", /*training=*/false);
    EXPECT_FALSE(grad_mode);
  }
  EXPECT_EQ(listener_.ended.size(), 2u);
  listener_.used.clear();
  zero::ReadScope({at::ones({3})}, "no parameter", true);
  EXPECT_TRUE(listener_.used.empty());
  listener_.throws = true;
  EXPECT_THROW(zero::ReadScope({a}, "refused", true), std::runtime_error);
  EXPECT_EQ(listener_.ended.size(), 2u) << "it had not begun";
}

TEST_F(Interception, AKernelsWritesAreAsked) {
  const auto p = parameter({3}, 4);
  zero::ReadScope::check_write({at::ones({3}), p.detach()}, "a kernel");
  EXPECT_EQ(listener_.written, (std::vector<Call>{{"a kernel", {4}}}));
  EXPECT_TRUE(listener_.used.empty());
  listener_.writes = false;
  EXPECT_THROW(zero::ReadScope::check_write({p}, "a kernel"), ConfigError) << "a kernel's write cannot be skipped";
}

TEST_F(Interception, StoppedIsForgotten) {
  auto p = at::ones({3});
  EXPECT_FALSE(is_intercepted(p));
  intercept(p, &listener_, 1);
  EXPECT_TRUE(is_intercepted(p));
  const auto view = p.view({3, 1});
  stop_intercepting(p, p.storage());
  EXPECT_FALSE(is_intercepted(p));
  p.add(1);
  view.add(1);  // still has the key, but no listener
  EXPECT_TRUE(listener_.used.empty());
  EXPECT_FALSE(is_intercepted(view));
}

}  // namespace
}  // namespace zero::torch_hooks::interception_test
