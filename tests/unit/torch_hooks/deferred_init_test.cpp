// What the function of zero::build does with parameters that have no memory yet: the values are those of an eager run.
#include "torch_hooks/deferred_init.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <set>
#include <stdexcept>

#include "torch_hooks/interception.h"

namespace zero::test::deferred_init_test {
namespace {

using namespace zero::torch_hooks;
using Tensors = std::vector<at::Tensor>;
using Make = std::function<Tensors()>;

// Contents of the tensors that make() returns, whose first one is a parameter.
Tensors values(const Make& make, bool deferred) {
  at::manual_seed(3);
  Tensors made;
  if (deferred) {
    const DeferredRecording recording;
    made = make();
  } else {
    made = make();
  }
  if (deferred) replay_deferred(made, [](std::size_t) {});
  Tensors copies;
  for (const auto& tensor : made) copies.push_back(tensor.contiguous().clone());
  copies.push_back(at::rand({3}));  // where the generator is left
  return copies;
}

void expect_equal(const Make& make, const std::string& what) {
  const auto wanted = values(make, false), found = values(make, true);
  ASSERT_EQ(found.size(), wanted.size()) << what;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_EQ(found[i].scalar_type(), wanted[i].scalar_type()) << what << " of tensor " << i;
    EXPECT_TRUE(found[i].equal(wanted[i])) << what << ": another value of tensor " << i;
  }
}

at::Tensor parameter() { return at::empty({6, 6}).normal_(); }

TEST(DeferredInit, WritesAndReadsHaveTheEagerValues) {
  const at::NoGradGuard no_grad;
  expect_equal(
      [] {
        const auto w = parameter();
        return Tensors{w, w.t().contiguous()};
      },
      "contiguous");
  expect_equal(
      [] {
        const auto w = parameter();
        return Tensors{w, w.to(at::kDouble).to(at::kFloat)};
      },
      "to");
  expect_equal(
      [] {
        const auto w = parameter();
        return Tensors{w, w.to(at::kBFloat16)};
      },
      "another type");
  expect_equal(
      [] {
        const auto w = parameter(), v = parameter();
        return Tensors{w, at::cat({w, v}, 1)};
      },
      "cat");
  expect_equal(
      [] {
        const auto w = parameter();
        return Tensors{w, at::stack({w[0], w[1]})};
      },
      "stack");
  expect_equal(
      [] {
        const auto w = parameter();
        return Tensors{w, w.t_().mul_(2).clone()};
      },
      "another shape in place");
  expect_equal(
      [] {
        const auto w = parameter();
        w.index_put_({at::tensor({1, 2})}, at::zeros({6}));
        return Tensors{w};
      },
      "some rows");
  expect_equal(
      [] {
        const auto w = parameter();
        return Tensors{w, w * torch::tensor({0.5f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f})};
      },
      "numbers that are written without an operator");
  expect_equal(
      [] {
        const auto w = parameter();
        at::_foreach_mul_({w, parameter()}, 3);
        return Tensors{w};
      },
      "a list that is written");
}

// What a recorded initializer reads may change before it runs.
TEST(DeferredInit, InitializersReadWhatTheirSourceHeldThen) {
  const at::NoGradGuard no_grad;
  expect_equal(
      [] {
        const auto w = parameter(), v = at::ones({6, 6});
        w.copy_(v);
        v.add_(1);
        return Tensors{w, v};
      },
      "a source that is written");
  std::vector<float> memory(36, 1);
  const auto of_another = [&] {
    memory.assign(36, 1);
    const auto w = parameter();
    w.copy_(at::from_blob(memory.data(), {6, 6}));
    memory.assign(36, 7);
    return Tensors{w};
  };
  expect_equal(of_another, "a source in memory of the program");
  expect_equal(
      [] {
        auto w = parameter();
        const auto v = parameter();
        w.set_data(at::ones({6, 6}));
        return Tensors{v, w};
      },
      "a parameter that got other memory");
  expect_equal(
      [] {
        auto generator = at::make_generator<at::CPUGeneratorImpl>();
        generator.set_current_seed(5);
        const auto w = at::empty({6}).normal_(0, 1, generator);
        generator.set_current_seed(6);
        return Tensors{w, parameter()};
      },
      "a generator of the program");
}

// A layer that is made what it is already keeps its place.
TEST(DeferredInit, ViewsAndConversionsThatCopyNothingReadNothing) {
  const at::NoGradGuard no_grad;
  const DeferredRecording recording;
  const auto w = parameter();
  for (const auto& same : {w.contiguous(), w.to(at::kFloat), w.to(at::kCPU, at::kFloat), w.reshape({-1}), w.flatten(),
                           w.view({36}), w.t(), w.detach()})
    EXPECT_TRUE(is_deferred(same));
  (void)at::zeros_like(w);
  w.requires_grad_();
  EXPECT_TRUE(w.requires_grad());
  EXPECT_TRUE(is_deferred(w));
  (void)w.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  EXPECT_FALSE(is_deferred(w));
}

TEST(DeferredInit, MemoryIsNotReadWithoutAnOperator) {
  const DeferredRecording recording;
  const auto w = parameter();
  for (const auto& read : {std::function<void()>([&] { (void)w.data_ptr(); }),
                           std::function<void()>([&] { (void)w.const_data_ptr<float>(); })}) {
    try {
      read();
      ADD_FAILURE() << "an address of no memory";
    } catch (const c10::Error& e) {
      EXPECT_NE(std::string(e.what()).find("[zero::build] cannot read a parameter that has no values yet"),
                std::string::npos)
          << e.what();
    }
  }
  EXPECT_TRUE(w.clone().isfinite().all().item<bool>());
  EXPECT_NE(w.data_ptr(), nullptr);
}

// --- every operator that may return a view ------------------------------------------------------

// An argument of that type and number, or none.
std::optional<c10::IValue> argument_of(const c10::Argument& argument, int choice) {
  if (argument.default_value()) return argument.default_value();
  const auto type = argument.type()->str();
  static const std::vector<std::vector<std::int64_t>> lists{{36}, {0, 1}, {2, 3, 6}, {6, 6}};
  const auto number = static_cast<std::size_t>(choice) % lists.size();
  if (type.ends_with("?")) return c10::IValue();
  if (type == "Tensor") return c10::IValue(at::ones({6, 6}, at::kDouble));
  if (type == "int" || type == "SymInt") return c10::IValue(static_cast<std::int64_t>(choice % 3));
  if (type == "int[]" || type == "SymInt[]") return c10::IValue(lists[number]);
  if (type == "bool") return c10::IValue(choice % 2 == 1);
  if (type == "ScalarType") return c10::IValue(choice % 2 == 1 ? at::kDouble : at::kFloat);
  if (type == "Device") return c10::IValue(at::Device(at::kCPU));
  return std::nullopt;
}

Tensors tensors_in(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  Tensors all;
  if (value.isTensorList()) all = value.toTensorVector();
  return all;
}

TEST(DeferredInit, EveryOperatorThatMayReturnAView) {
  const at::NoGradGuard no_grad;
  std::set<std::string> tried;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || name.name.rfind("aten::_", 0) == 0) continue;
    const auto& arguments = op->schema().arguments();
    if (arguments.empty() || arguments[0].alias_info() == nullptr || arguments[0].alias_info()->isWrite()) continue;
    if (arguments[0].type()->str() != "Tensor") continue;
    for (int choice = 0; choice < 4; ++choice) {
      torch::jit::Stack further;
      for (std::size_t i = 1; i < arguments.size(); ++i)
        if (auto value = argument_of(arguments[i], choice)) further.push_back(std::move(*value));
      if (further.size() + 1 != arguments.size()) continue;
      const auto make = [&](bool turned) {
        return [&, turned] {
          const auto w = parameter();
          torch::jit::Stack stack{turned ? w.t() : w};
          stack.insert(stack.end(), further.begin(), further.end());
          op->callBoxed(stack);
          Tensors all{w};
          for (const auto& value : stack)
            for (const auto& tensor : tensors_in(value)) all.push_back(tensor);
          return all;
        };
      };
      for (const bool turned : {false, true}) {
        try {
          for (const auto& tensor : values(make(turned), false)) (void)tensor;
        } catch (const std::exception&) {
          continue;  // not with these arguments
        }
        tried.insert(name.name);
        expect_equal(make(turned), name.name + (turned ? " of a transpose" : ""));
      }
    }
  }
  for (const auto* const name : {"aten::contiguous", "aten::reshape", "aten::flatten", "aten::ravel", "aten::to",
                                 "aten::t", "aten::view", "aten::resolve_conj", "aten::select"})
    EXPECT_TRUE(tried.contains(name)) << name;
}

// Of two parameters, whose values others have, and a tied one.
TEST(DeferredInit, ValuesFromElsewhereAreAskedForByPlace) {
  const at::NoGradGuard no_grad;
  std::vector<int> asked;
  bool fails = true;
  auto owner = std::make_shared<int>(0);  // of what fill() holds
  const auto parameter_at = [&](std::int64_t place, double value) {
    return deferred_values({3, 2}, at::kBFloat16, c10::kCPU, place, [&, place, value, owner](const at::Tensor& values) {
      if (fails) throw std::runtime_error("a peer is gone");
      asked.push_back(static_cast<int>(place));
      values.fill_(value);
    });
  };
  const Tensors made{parameter_at(7, 1.5), parameter_at(2, 2.5)};
  const Tensors all{made[0], made[0].detach(), made[1], at::ones({2})};
  EXPECT_TRUE(is_deferred(made[0]) && is_deferred(made[1]) && !is_deferred(all[3]));
  EXPECT_THROW(made[0].sum().item<float>(), std::exception);
  EXPECT_THROW(replay_deferred(all, [](std::size_t) {}), std::runtime_error);
  EXPECT_TRUE(is_deferred(made[0]) && is_deferred(made[1])) << "values are still elsewhere";
  fails = false;
  std::vector<std::size_t> finished;
  replay_deferred(all, [&](std::size_t i) {
    finished.push_back(i);
    EXPECT_EQ(asked.size(), i == 2 ? 1U : 2U) << "more than one parameter has its values";
  });
  EXPECT_EQ(asked, (std::vector<int>{2, 7}));
  EXPECT_EQ(finished, (std::vector<std::size_t>{2, 0, 1}));
  EXPECT_TRUE(made[0].eq(1.5).all().item<bool>() && made[1].eq(2.5).all().item<bool>());
  EXPECT_EQ(made[0].scalar_type(), at::kBFloat16);
  EXPECT_FALSE(is_deferred(made[0]));
  EXPECT_EQ(owner.use_count(), 1) << "fill() is kept after the values are there";
}

}  // namespace
}  // namespace zero::test::deferred_init_test
