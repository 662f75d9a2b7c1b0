// Each mechanism of this layer, tried as the engine uses it. Each check states what libtorch has to do.
#include <zero/torch_check.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>

#include "torch_hooks/backward_task.h"
#include "torch_hooks/deferred_init.h"
#include "torch_hooks/gradient_hook.h"
#include "torch_hooks/interception.h"
#include "torch_hooks/normal_mode.h"
#include "torch_hooks/saved_tensors.h"
#include "torch_hooks/storage_access.h"

namespace zero {
namespace {

using namespace torch_hooks;

void expect(bool met, const char* text) {
  if (!met) throw std::runtime_error(text);
}

at::Tensor numbers(at::IntArrayRef sizes) {
  return at::arange(1, c10::multiply_integers(sizes) + 1).to(at::kFloat).view(sizes);
}

struct Counter final : UseListener {
  void before_use(const int* tags, int count, const char*) override {
    open += count;
    uses += count;
    wrong |= count != 1 || tags[0] != 7;
    if (provide) provide();
  }
  void after_use(const int*, int count) noexcept override { open -= count; }
  bool before_write(int, const char*) override {
    ++writes;
    return false;
  }
  std::function<void()> provide;
  int open = 0, uses = 0, writes = 0;
  bool wrong = false;
};

// As a parameter of stage 3: no data outside of an operator, forward and backward.
void interception() {
  const auto values = numbers({2, 3}), x = numbers({4, 3}).requires_grad_();
  const auto plain = values.clone().requires_grad_(), parameter = values.clone().requires_grad_();
  const auto storage = parameter.storage();
  Counter counter;
  intercept(parameter, &counter, 7);
  const auto end = [&] { stop_intercepting(parameter, storage); };
  try {
    counter.provide = [&] { gather_storage(storage, values, 0); };
    release_storage(storage, "a parameter without data");
    const auto loss = at::linear(x, parameter).mul(parameter.t()[0].sum()).sum();
    expect(counter.uses >= 2, "operators that read a parameter, or a view of it, are not seen");
    expect(!counter.wrong && counter.open == 0, "the uses of a parameter by operators are not paired");
    const int forward = counter.uses;
    release_storage(storage, "a parameter without data");
    loss.backward();
    expect(counter.uses > forward && counter.open == 0, "operators of backward that read a parameter are not seen");
    const auto gradient = x.grad().clone();
    x.mutable_grad() = at::Tensor();
    at::linear(x, plain).mul(plain.t()[0].sum()).sum().backward();
    expect(gradient.equal(x.grad()) && parameter.grad().equal(plain.grad()), "a parameter's gradient is another one");
    {
      const at::NoGradGuard no_grad;
      parameter.mul_(2);
    }
    expect(counter.writes == 1 && values.equal(numbers({2, 3})), "a write to a parameter is not seen");
  } catch (...) {
    end();
    throw;
  }
  end();
  const int before = counter.uses;
  (void)parameter.sum();
  expect(counter.uses == before, "a parameter is intercepted after the end");
}

void storage_access() {
  const auto buffer = numbers({8});
  auto tensor = numbers({2, 2}).neg();
  const auto view = tensor.t();
  const auto version = tensor._version();
  release_storage(tensor.storage(), "no data here");
  expect(has_no_data(tensor), "a storage keeps its data");
  bool guarded = false;
  try {
    (void)tensor.const_data_ptr<float>();
  } catch (const c10::Error& error) {
    guarded = std::string(error.what()).find("no data here") != std::string::npos;
  }
  expect(guarded, "a read of a tensor without data is no error");
  gather_storage(tensor.storage(), buffer, 4 * sizeof(float));
  expect(tensor.equal(numbers({2, 2}) + 4) && view.equal(tensor.t()), "a view does not see its storage's new data");
  expect(tensor._version() == version, "new data of a storage count as a write");
  auto alone = without_data({3}, at::kFloat, at::kCPU);
  expect(has_no_data(alone) && alone.numel() == 3, "a tensor without data has some");
  gather_storage(alone.storage(), buffer, 0);
  expect(alone.equal(numbers({3})), "a tensor that was made without data does not take any");
}

void gradient_hooks() {
  auto parameter = numbers({3}).requires_grad_();
  int calls = 0;
  bool complete = false, ended = false, accumulates = false;
  const auto number = std::make_shared<int>(-1);
  set_gradient_hook(parameter, [&] {
    ++calls;
    complete = parameter.grad().equal(numbers({3}) * 2 + 1);
    accumulates = accumulates_into(parameter);
    *number = backward_number();
    at_end([&] { ended = true; });
  });
  expect(gradient_hook_of(parameter) == HookPlace::Ours, "a parameter does not have the hook that was set");
  (parameter.square() + parameter).sum().backward();
  const int first = *number;
  expect(calls == 1, "the hook of a gradient is not called once a backward()");
  expect(complete, "the hook of a gradient is called before all contributions are summed");
  expect(accumulates && ended, "a hook does not know the backward() that calls it");
  parameter.mutable_grad() = at::Tensor();
  (parameter.square() + parameter).sum().backward();
  expect(*number > first, "a later backward() has no higher number");
  set_gradient_hook(parameter, {});
  expect(gradient_hook_of(parameter) == HookPlace::Empty, "the hook of a gradient stays");
}

// Saves the negative of each tensor.
struct Negated final : SavedTensorHooks {
  void call_pack_hook(const at::Tensor& tensor) override {
    const at::NoGradGuard no_grad;
    packed = tensor.detach().neg();
  }
  at::Tensor call_unpack_hook() override { return packed.neg(); }
  at::Tensor packed;
};

struct Negating final : SavedTensorPolicy {
  std::unique_ptr<SavedTensorHooks> saved() override {
    ++count;
    return std::make_unique<Negated>();
  }
  void begin_segment() override {}
  std::shared_ptr<CheckpointFrame> end_segment() override { return nullptr; }
  int count = 0;
};

void saved_tensors() {
  const auto before = saved_tensor_policy();
  const auto policy = std::make_shared<Negating>();
  const auto parameter = numbers({3}).requires_grad_();
  set_saved_tensor_policy(policy);
  at::Tensor loss;
  try {
    loss = (parameter.exp() * numbers({3})).sum();
  } catch (...) {
    set_saved_tensor_policy(before);
    throw;
  }
  set_saved_tensor_policy(before);
  expect(policy->count >= 1, "tensors that autograd saves are not seen");
  loss.backward();
  expect(parameter.grad().equal(parameter.detach().exp() * numbers({3})),
         "a saved tensor is not the one that its hook returns");
  const int seen = policy->count;
  (void)(parameter.exp() * numbers({3})).sum();
  expect(policy->count == seen, "tensors are seen after the end");
}

void deferred_initialization() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const auto state = generator.get_state();
  const at::NoGradGuard no_grad;
  const auto build = [] {
    std::vector<at::Tensor> made{at::empty({4, 3}).normal_(), at::empty({5}).uniform_(-1, 1)};
    made[0].mul_(2).t().fill_diagonal_(1);
    return made;
  };
  try {
    generator.set_current_seed(3);
    const auto eager = build();
    const auto next = at::rand({2});
    std::vector<at::Tensor> deferred;
    generator.set_current_seed(3);
    {
      const DeferredRecording recording;
      deferred = build();
    }
    const bool empty = is_deferred(deferred[0]) && has_no_data(deferred[1]);
    replay_deferred(deferred, [](std::size_t) {});
    const auto later = at::rand({2});
    generator.set_state(state);
    expect(empty, "a tensor that is built without memory has some");
    expect(eager[0].equal(deferred[0]) && eager[1].equal(deferred[1]),
           "initial values are not those of an eager build");
    expect(next.equal(later), "the random number generator is not where an eager build leaves it");
  } catch (...) {
    generator.set_state(state);
    throw;
  }
}

TorchCheck run(const char* name, void (*test)()) {
  try {
    test();
    return {name, {}};
  } catch (const std::exception& error) {
    const std::string text = error.what();  // libtorch's have a backtrace on further lines
    return {name, text.substr(0, text.find('\n'))};
  }
}

}  // namespace

std::vector<TorchCheck> check_torch() {
  const NormalMode normal;
  const at::AutoGradMode grad(true);
  std::vector<TorchCheck> checks{run("interception of operators", interception),
                                 run("memory of storages", storage_access), run("hooks of gradients", gradient_hooks),
                                 run("deferred initialization", deferred_initialization)};
  if (may_install_engine()) checks.push_back(run("saved tensors", saved_tensors));
  return checks;
}

}  // namespace zero
