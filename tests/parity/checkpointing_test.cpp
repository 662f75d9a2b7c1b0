// Activation checkpointing changes memory and time, never a bit of a gradient: alone, and under the
// engine at every stage.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>
#include <zero/library.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "parity/problems.h"

namespace checkpointing_test {
namespace {

namespace nn = torch::nn;
using zero::activation_checkpoint;

at::Tensor random_tensor(at::IntArrayRef sizes, std::uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator);
}

// Every bit, NaN apart.
void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), expected[i].defined()) << "tensor " << i;
    if (got[i].defined()) {
      EXPECT_TRUE(got[i].equal(expected[i])) << "tensor " << i;
    }
  }
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> all;
  for (const auto& p : parameters) {
    all.push_back(p.grad().defined() ? p.grad().clone() : at::Tensor());
    p.mutable_grad() = at::Tensor();
  }
  return all;
}

// What backward throws, empty for nothing.
std::string fault_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const zero::ConfigError& error) {
    return error.what();
  }
  return "";
}

struct Weights {
  at::Tensor w1 = random_tensor({16, 32}, 1).div_(4).requires_grad_(),
             w2 = random_tensor({32, 16}, 2).div_(5).requires_grad_();
  std::vector<at::Tensor> all() const { return {w1, w2}; }
  at::Tensor operator()(const at::Tensor& x) const { return x + at::gelu(x.mm(w1)).mm(w2); }
};

TEST(Checkpointing, GradientsHaveTheSameBits) {
  Weights first, second;
  second.w1 = random_tensor({16, 32}, 3).div_(4).requires_grad_();
  auto input = random_tensor({8, 16}, 4).requires_grad_();
  const std::vector<at::Tensor> leaves{first.w1, first.w2, second.w1, second.w2, input};
  second(at::tanh(first(input))).pow(2).sum().backward();
  const auto plain = gradients_of(leaves);
  const auto inner = activation_checkpoint([&](at::Tensor x) { return at::tanh(first(x)); }, input);
  activation_checkpoint([&](at::Tensor x) { return second(x); }, inner).pow(2).sum().backward();
  expect_equal(gradients_of(leaves), plain);
}

TEST(Checkpointing, RunsOnceMoreAndNotToItsEnd) {
  Weights weights;
  int begun = 0, ended = 0;
  auto input = random_tensor({8, 16}, 4).requires_grad_();
  auto output = activation_checkpoint(
      [&](at::Tensor x) {
        ++begun;
        auto y = weights(x);
        ++ended;
        return y;
      },
      input);
  EXPECT_EQ(begun, 1);
  EXPECT_EQ(ended, 1);
  output.sum().backward();
  EXPECT_EQ(begun, 2);
  EXPECT_EQ(ended, 1) << "the last product saves nothing after its inputs, so it needs no second run";
}

TEST(Checkpointing, NoexceptFunctionsRunToTheirEnd) {
  Weights weights;
  auto input = random_tensor({8, 16}, 4).requires_grad_();
  weights(input).sum().backward();
  auto leaves = weights.all();
  leaves.push_back(input);
  const auto plain = gradients_of(leaves);
  activation_checkpoint([&](at::Tensor x) noexcept { return weights(x); }, input).sum().backward();
  expect_equal(gradients_of(leaves), plain);
}

TEST(Checkpointing, DropoutIsRepeatedAndTheGeneratorContinues) {
  Weights weights;
  auto input = random_tensor({8, 16}, 4).requires_grad_();
  const auto segment = [&](at::Tensor x) { return at::dropout(weights(at::dropout(x, 0.3, true)), 0.5, true); };
  std::vector<std::vector<at::Tensor>> results;
  for (const bool checkpointed : {false, true}) {
    torch::manual_seed(11);
    auto y =
        checkpointed ? activation_checkpoint(segment, activation_checkpoint(segment, input)) : segment(segment(input));
    const auto between = at::rand({4});
    y.pow(2).sum().backward();
    auto leaves = weights.all();
    leaves.push_back(input);
    auto all = gradients_of(leaves);
    all.push_back(y.detach());
    all.push_back(between);
    all.push_back(at::rand({4}));
    results.push_back(std::move(all));
  }
  expect_equal(results[1], results[0]);
  EXPECT_TRUE((results[0][3] == 0).any().item<bool>()) << "dropout did nothing";
}

TEST(Checkpointing, WithoutRandomNumbersTheGeneratorIsLeftAlone) {
  Weights weights;
  auto input = random_tensor({8, 16}, 4).requires_grad_();
  torch::manual_seed(3);
  const auto expected = at::rand({4});
  torch::manual_seed(3);
  at::Tensor drawn;
  int runs = 0;
  auto y = activation_checkpoint(
      [&](at::Tensor x) {
        // As another thread would, in the middle of the second run.
        if (++runs == 2) drawn = at::rand({4});
        return weights(x);
      },
      input);
  y.sum().backward();
  EXPECT_TRUE(drawn.equal(expected));
  EXPECT_FALSE(at::rand({4}).equal(expected)) << "the numbers were given out twice";
}

TEST(Checkpointing, Nested) {
  Weights a, b, c;
  b.w1 = random_tensor({16, 32}, 7).div_(4).requires_grad_();
  c.w2 = random_tensor({32, 16}, 8).div_(4).requires_grad_();
  auto input = random_tensor({8, 16}, 4).requires_grad_();
  const std::vector<at::Tensor> leaves{a.w1, a.w2, b.w1, b.w2, c.w1, c.w2, input};
  int runs = 0;
  const auto drop = [](const at::Tensor& x) { return at::dropout(at::tanh(x), 0.2, true); };
  std::vector<std::vector<at::Tensor>> results;
  for (const bool checkpointed : {false, true}) {
    torch::manual_seed(5);
    runs = 0;
    const auto inner = [&](at::Tensor x) {
      ++runs;
      return drop(b(x));
    };
    const auto outer = [&](at::Tensor x) {
      auto y = drop(a(x));
      y = checkpointed ? activation_checkpoint(inner, y) : inner(y);
      return drop(c(y));
    };
    auto y = checkpointed ? activation_checkpoint(outer, input) : outer(input);
    y.pow(2).sum().backward();
    results.push_back(gradients_of(leaves));
  }
  expect_equal(results[1], results[0]);
  EXPECT_EQ(runs, 3);  // forward, the outer second run, its own
}

TEST(Checkpointing, TheSameFunctionTwiceWithTiedAndFrozenParameters) {
  Weights tied;
  auto frozen = random_tensor({16, 16}, 9);
  auto tokens = at::arange(8);
  auto table = random_tensor({8, 16}, 10).requires_grad_();
  const auto block = [&](at::Tensor x) { return tied(at::relu(x.mm(frozen)).mm(frozen.t())); };
  const auto embed = [&](at::Tensor ids) { return at::tanh(at::embedding(table, ids)); };
  std::vector<std::vector<at::Tensor>> results;
  for (const bool checkpointed : {false, true}) {
    at::Tensor y;
    if (checkpointed) {
      y = activation_checkpoint(embed, tokens);  // no input that requires grad
      for (int i = 0; i < 2; ++i) y = activation_checkpoint(block, y);
      y = activation_checkpoint([&](at::Tensor x) { return at::linear(x, table); }, y);
    } else {
      y = at::linear(block(block(embed(tokens))), table);
    }
    at::cross_entropy_loss(y, tokens).backward();
    results.push_back(gradients_of({tied.w1, tied.w2, table}));
  }
  expect_equal(results[1], results[0]);
  EXPECT_FALSE(frozen.grad().defined());
}

TEST(Checkpointing, SeveralInputsOutputsAndOtherArguments) {
  Weights weights;
  auto x = random_tensor({8, 16}, 4).requires_grad_(), y = random_tensor({8, 16}, 5).requires_grad_();
  const auto segment = [&](at::Tensor a, double factor, const at::Tensor& b, const at::Tensor& none) {
    EXPECT_FALSE(none.defined());
    return std::make_tuple(weights(a * b) * factor, at::sigmoid(a - b));
  };
  std::vector<std::vector<at::Tensor>> results;
  const auto leaves = [&] { return std::vector<at::Tensor>{weights.w1, weights.w2, x, y}; };
  for (const bool checkpointed : {false, true}) {
    const auto [p, q] =
        checkpointed ? activation_checkpoint(segment, x, 0.5, y, at::Tensor()) : segment(x, 0.5, y, at::Tensor());
    (p.pow(2).sum() + (q * p).sum()).backward();
    results.push_back(gradients_of(leaves()));
  }
  expect_equal(results[1], results[0]);
}

TEST(Checkpointing, ARetainedGraphRunsAgain) {
  Weights weights;
  auto input = random_tensor({8, 16}, 4).requires_grad_();
  int runs = 0;
  auto loss = activation_checkpoint(
                  [&](at::Tensor x) {
                    ++runs;
                    return at::tanh(weights(x));
                  },
                  input)
                  .sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = gradients_of(weights.all());
  loss.backward();
  expect_equal(gradients_of(weights.all()), once);
  EXPECT_EQ(runs, 3);
}

TEST(Checkpointing, NothingIsDoneWithoutGrad) {
  Weights weights;
  int runs = 0;
  at::NoGradGuard no_grad;
  const auto input = random_tensor({8, 16}, 4);
  const auto y = activation_checkpoint(
      [&](at::Tensor x) {
        ++runs;
        return weights(x);
      },
      input);
  EXPECT_TRUE(y.equal(weights(input)));
  EXPECT_EQ(runs, 1);
}

TEST(Checkpointing, ASecondRunThatDiffersIsAnError) {
  Weights weights;
  auto input = random_tensor({8, 16}, 4).requires_grad_();
  int runs = 0;
  const auto run = [&](const std::function<at::Tensor(at::Tensor)>& first,
                       const std::function<at::Tensor(at::Tensor)>& second) {
    runs = 0;
    auto y = activation_checkpoint([&](at::Tensor x) { return ++runs == 1 ? first(x) : second(x); }, input);
    return fault_of([&] { y.sum().backward(); });
  };
  const auto three = [](at::Tensor x) { return x.tanh().sigmoid().exp(); };
  const auto one = [](at::Tensor x) { return x.tanh(); };
  const auto wide = [](at::Tensor x) { return at::cat({x, x}, 1).tanh().sigmoid().exp(); };
  EXPECT_EQ(run(three, three), "");
  EXPECT_NE(run(three, one).find("got 1 saved tensors from the second run, expected 3"), std::string::npos)
      << run(three, one);
  EXPECT_NE(run(three, wide)
                .find("got Float [8, 32] on cpu as saved tensor 0 of the second run, expected Float [8, 16] on cpu"),
            std::string::npos)
      << run(three, wide);
  // More of them: noticed when the segment runs to its end, as it does with random numbers.
  const auto drawn = [](at::Tensor x) { return at::dropout(x, 0.5, true); };
  const auto more = [](at::Tensor x) { return at::dropout(x, 0.5, true).tanh().exp(); };
  EXPECT_NE(run(drawn, more).find("more saved tensors"), std::string::npos) << run(drawn, more);
  const auto twice = [](at::Tensor x) {
    auto y = at::dropout(x, 0.5, true);
    at::rand({3});
    return y;
  };
  EXPECT_NE(run(drawn, twice).find("other random numbers"), std::string::npos) << run(drawn, twice);
  EXPECT_EQ(run(drawn, drawn), "");
}

TEST(Checkpointing, WritesBetweenForwardAndBackwardAreErrors) {
  Weights weights;
  auto leaf = random_tensor({8, 16}, 4).requires_grad_();
  auto input = leaf * 2;
  auto y = activation_checkpoint([&](at::Tensor x) { return weights(x); }, input);
  input.add_(1);
  EXPECT_NE(fault_of([&] { y.sum().backward(); }).find("input that was written in place"), std::string::npos);
  y = activation_checkpoint([&](at::Tensor x) { return weights(x); }, leaf);
  {
    at::NoGradGuard no_grad;
    weights.w2.mul_(2);
  }
  EXPECT_NE(fault_of([&] { y.sum().backward(); }).find("parameter that was written in place"), std::string::npos);
}

// As without checkpointing: what an operation has saved must not change.
TEST(Checkpointing, WritesToWhatTheSegmentSavedAreErrors) {
  Weights weights;
  auto leaf = random_tensor({8, 16}, 4).requires_grad_();
  const auto fault = [&](const std::function<at::Tensor(at::Tensor)>& segment, bool outside) {
    return fault_of([&] {
      auto y = activation_checkpoint(segment, leaf * 2);
      if (outside) y.mul_(2);
      y.sum().backward();
    });
  };
  const auto written = "written in place after an operation in the segment had saved it";
  // Inside: before the last operation that saves, and behind it, where the second run stops.
  const auto before = [](at::Tensor x) { return x.tanh().mul_(2).exp(); };
  const auto behind = [](at::Tensor x) { return x.tanh().mul_(2); };
  EXPECT_NE(fault(before, false).find(written), std::string::npos) << fault(before, false);
  EXPECT_NE(fault(behind, false).find(written), std::string::npos) << fault(behind, false);
  // The output, saved by the segment's last operation.
  const auto output = [](at::Tensor x) { return x.tanh(); };
  EXPECT_EQ(fault(output, false), "");
  EXPECT_NE(fault(output, true).find(written), std::string::npos) << fault(output, true);
  // The input, by the segment itself.
  const auto input = [](at::Tensor x) { return x.mul_(2).tanh(); };
  EXPECT_NE(fault(input, false).find("input that was written in place"), std::string::npos) << fault(input, false);
}

TEST(Checkpointing, WritesToWhatNobodySavedAreFine) {
  Weights weights;
  auto leaf = random_tensor({8, 16}, 4).requires_grad_();
  const auto segment = [&](at::Tensor x) { return weights(x.add(1).add_(2).relu_()).mul_(3); };
  std::vector<std::vector<at::Tensor>> results;
  for (const bool checkpointed : {false, true}) {
    auto y = checkpointed ? activation_checkpoint(segment, leaf) : segment(leaf);
    y.add_(1);
    y.sum().backward();
    auto leaves = weights.all();
    leaves.push_back(leaf);
    results.push_back(gradients_of(leaves));
  }
  expect_equal(results[1], results[0]);
}

TEST(Checkpointing, FunctionsWithoutAResult) {
  auto leaf = random_tensor({8, 16}, 4).requires_grad_();
  at::Tensor out;
  int runs = 0;
  activation_checkpoint(
      [&](at::Tensor x) {
        if (++runs == 1)
          out = x.tanh().exp();
        else
          (void)x.tanh().exp();
      },
      leaf);
  out.sum().backward();
  EXPECT_EQ(runs, 2);
  EXPECT_TRUE(leaf.grad().equal(torch::autograd::grad({leaf.tanh().exp().sum()}, {leaf})[0]));
}

TEST(Checkpointing, BackwardInsideASegmentIsAnError) {
  auto input = random_tensor({8, 16}, 4).requires_grad_();
  const auto fault = fault_of([&] {
    activation_checkpoint(
        [](at::Tensor x) {
          auto y = x.tanh().sum();
          return torch::autograd::grad({y}, {x})[0];
        },
        input);
  });
  EXPECT_NE(fault.find("still running"), std::string::npos) << fault;
}

TEST(Checkpointing, ExceptionsPassAndLeaveNothingBehind) {
  auto input = random_tensor({8, 16}, 4).requires_grad_();
  int runs = 0;
  const auto segment = [&](at::Tensor x) {
    auto y = x.tanh();
    if (++runs == 2) throw std::runtime_error("from the function");
    return y.exp();
  };
  auto y = activation_checkpoint(segment, input);
  try {
    y.sum().backward();
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "from the function");
  }
  runs = 1;
  EXPECT_THROW(activation_checkpoint(segment, input), std::runtime_error);
  // Saving works as usual again.
  auto other = input.tanh();
  other.sum().backward();
  EXPECT_TRUE(input.grad().defined());
  input.mutable_grad() = at::Tensor();
  runs = 5;
  activation_checkpoint(segment, input).sum().backward();
  EXPECT_TRUE(input.grad().defined());
}

TEST(Checkpointing, MemoryOfASegmentEndsWithItsGraph) {
  auto held = std::make_shared<int>(0);
  auto input = random_tensor({8, 16}, 4).requires_grad_();
  {
    auto y = activation_checkpoint([held](at::Tensor x) { return x.tanh().exp(); }, input);
    EXPECT_GT(held.use_count(), 1);
    y.sum().backward();
  }
  EXPECT_EQ(held.use_count(), 1) << "a cycle keeps the segment";
  {
    auto unused = activation_checkpoint(
        [held](at::Tensor x) { return activation_checkpoint([held](at::Tensor z) { return z.exp(); }, x).tanh(); },
        input);
  }
  EXPECT_EQ(held.use_count(), 1);
}

TEST(Checkpointing, ThreadsDoNotDisturbEachOther) {
  Weights weights;
  auto inputs = random_tensor({2, 8, 16}, 4);
  std::vector<at::Tensor> expected(2), got(2);
  for (int r = 0; r < 2; ++r) {
    auto x = inputs[r].clone().requires_grad_();
    expected[r] = torch::autograd::grad({weights(at::tanh(weights(x))).sum()}, {x})[0];
  }
  std::atomic<int> different{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      for (int k = 0; k < 50; ++k) {
        auto x = inputs[r].clone().requires_grad_();
        auto y = activation_checkpoint([&](at::Tensor z) { return weights(at::tanh(weights(z))); }, x);
        if (!torch::autograd::grad({y.sum()}, {x})[0].equal(expected[r])) ++different;
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(different, 0);
}

// --- under the engine ----------------------------------------------------------------------------

struct BlockImpl : nn::Module {
  nn::LayerNorm norm{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
  BlockImpl(std::int64_t width, bool frozen) {
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    up = register_module("up", nn::Linear(width, 4 * width));
    down = register_module("down", nn::Linear(4 * width, width));
    if (frozen) down->weight.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::gelu(up(norm(x)))); }
};
TORCH_MODULE(Block);

enum class Mode { Plain, PerBlock, Nested };

struct Net : nn::Module {
  nn::Embedding tokens{nullptr};
  nn::ModuleList blocks;
  Mode mode;
  Net(Mode m, std::int64_t layers = 4, std::int64_t width = 24) : mode(m) {
    tokens = register_module("tokens", nn::Embedding(32, width));
    for (std::int64_t i = 0; i < layers; ++i) blocks->push_back(Block(width, i == 1));
    register_module("blocks", blocks);
  }
  at::Tensor block(std::size_t i, const at::Tensor& x) {
    auto* one = blocks[i]->as<Block>();
    if (mode == Mode::Plain) return one->forward(x);
    return activation_checkpoint([one](const at::Tensor& y) { return one->forward(y); }, x);
  }
  at::Tensor loss(const at::Tensor& ids) {
    auto x = tokens(ids);
    if (mode == Mode::Nested) {
      // Segments of two units each, and a unit again inside.
      for (std::size_t i = 0; i + 1 < blocks->size(); i += 2)
        x = activation_checkpoint([this, i](const at::Tensor& y) { return block(i + 1, block(i, y)); }, x);
    } else {
      for (std::size_t i = 0; i < blocks->size(); ++i) x = block(i, x);
    }
    const auto logits = at::linear(x, tokens->weight);  // tied
    return at::cross_entropy_loss(logits.reshape({-1, 32}).to(at::kFloat), ids.reshape({-1}));
  }
};

struct Trained {
  std::string hash;
  std::vector<double> losses;
};

Trained train(Mode mode, int stage, int world, const std::string& recipe, int accumulation) {
  Trained first;
  std::mutex mutex;
  zero::run_ranks(world, [&](std::shared_ptr<zero::Communicator> comm) {
    at::set_num_threads(1);
    std::shared_ptr<Net> net;
    {
      std::lock_guard<std::mutex> lock(mutex);  // initialisers draw from the shared generator
      net = std::make_shared<Net>(mode);
      zero::test::fill_parameters(*net, 5);
    }
    std::string json =
        R"({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": )" + std::to_string(accumulation) +
        R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": )" +
        std::to_string(stage) + "}" + (recipe == "fp32" ? "" : ", \"" + recipe + "\": {\"enabled\": true}") + "}";
    zero::Engine engine(net, zero::Options::from_json(json), comm);
    auto generator = at::detail::createCPUGenerator(100 + static_cast<std::uint64_t>(comm->rank()));
    std::vector<double> losses;
    for (int step = 0; step < 4 * accumulation; ++step) {
      auto loss = net->loss(at::randint(0, 32, {2, 12}, generator, at::kLong));
      engine.backward(loss);
      losses.push_back(loss.item<double>());
      engine.step();
    }
    auto hash = engine.state_hash();
    std::lock_guard<std::mutex> lock(mutex);
    if (comm->rank() == 0) first = {hash, losses};
  });
  return first;
}

class CheckpointingStages : public ::testing::TestWithParam<std::string> {};

TEST_P(CheckpointingStages, TheStateIsTheSameWithAndWithout) {
  const auto plain = train(Mode::Plain, 0, 2, GetParam(), 1);
  ASSERT_LT(plain.losses.back(), plain.losses.front());
  for (int stage = 0; stage <= 3; ++stage)
    for (const auto mode : {Mode::PerBlock, Mode::Nested}) {
      const auto run = train(mode, stage, 2, GetParam(), 1);
      EXPECT_EQ(run.hash, plain.hash) << "stage " << stage << (mode == Mode::Nested ? ", nested" : "");
      EXPECT_EQ(run.losses, plain.losses) << "stage " << stage;
    }
}
INSTANTIATE_TEST_SUITE_P(Recipes, CheckpointingStages, ::testing::Values("fp32", "bf16"));

// Per stage: gradients of several micro-batches are summed before or after the reduction.
TEST(CheckpointingEngine, Accumulation) {
  for (const int stage : {1, 2, 3}) {
    const auto plain = train(Mode::Plain, stage, 2, "fp32", 3);
    EXPECT_EQ(train(Mode::PerBlock, stage, 2, "fp32", 3).hash, plain.hash) << "stage " << stage;
    EXPECT_EQ(train(Mode::Nested, stage, 2, "fp32", 3).hash, plain.hash) << "stage " << stage;
  }
}

TEST(CheckpointingEngine, PeakActivationsFall) {
  std::vector<std::uint64_t> peaks;
  for (const auto mode : {Mode::Plain, Mode::PerBlock, Mode::Nested}) {
    auto net = std::make_shared<Net>(mode, 12, 32);
    zero::test::fill_parameters(*net, 5);
    zero::Engine engine(net, zero::Options::from_json(R"({"train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}})"),
                        zero::Communicator::local());
    const auto ids = at::arange(8 * 64).remainder(32).view({8, 64});
    for (int step = 0; step < 2; ++step) {
      engine.reset_peak_memory();
      engine.backward(net->loss(ids));
      engine.step();
    }
    using Report = zero::MemoryReport;
    peaks.push_back(engine.memory().peak(Report::Tier::Device, Report::Purpose::Activations));
  }
  // A block saves 4 + 4 widths inside and 2 - 3 around; a segment keeps one width and refills one block.
  EXPECT_LT(peaks[1] * 2, peaks[0]) << peaks[0] << " " << peaks[1] << " " << peaks[2];
  EXPECT_LT(peaks[2], peaks[1]) << peaks[0] << " " << peaks[1] << " " << peaks[2];
}

}  // namespace
}  // namespace checkpointing_test
