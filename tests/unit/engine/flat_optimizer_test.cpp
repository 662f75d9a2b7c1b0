// FlatOptimizer: its update compared with torch's AdamW, and invalid arguments, which must change nothing. The bits of
// the rules are tested in optimizer_test and optimizer_torch_test.
#include <zero/flat_optimizer.h>

#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>

#include <functional>

#include <zero/errors.h>

namespace zero::flat_optimizer_test {
namespace {

constexpr std::int64_t kElements = 37;

Options options(const std::string& optimizer = R"({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}})") {
  return Options::from_json("{\"optimizer\": " + optimizer + "}");
}

struct Flat {
  FlatOptimizer optimizer{options()};
  FlatTensors tensors{torch::randn({kElements}), optimizer.make_states(kElements), torch::randn({kElements}),
                      torch::zeros({kElements}, torch::kBFloat16)};
};

TEST(FlatOptimizer, UpdatesAsTorchDoesAndRoundsTheParameterOnce) {
  torch::manual_seed(1);
  Flat flat;
  EXPECT_EQ(flat.optimizer.state_names(), (std::vector<std::string>{"exp_avg", "exp_avg_sq"}));
  auto twin = flat.tensors.master.clone().requires_grad_();
  torch::optim::AdamW reference({twin}, torch::optim::AdamWOptions(0.01).weight_decay(0.1));
  for (int step = 1; step <= 3; ++step) {
    flat.tensors.gradient = torch::randn({kElements}) * 8;
    twin.mutable_grad() = flat.tensors.gradient / 8;
    reference.step();
    flat.optimizer.step(flat.tensors, 0.125f);
    EXPECT_EQ(flat.optimizer.applied_steps(), step);
    EXPECT_TRUE(torch::allclose(flat.tensors.master, twin.detach(), 1e-5, 1e-7));
    EXPECT_TRUE(torch::equal(flat.tensors.parameter, flat.tensors.master.to(torch::kBFloat16)));
  }
}

TEST(FlatOptimizer, WorksWithoutAParameterAndOnNoElements) {
  Flat flat;
  flat.tensors.parameter = at::Tensor();
  const auto before = flat.tensors.master.clone();
  flat.optimizer.step(flat.tensors);
  EXPECT_FALSE(torch::equal(flat.tensors.master, before));
  FlatTensors none{torch::empty({0}), flat.optimizer.make_states(0), torch::empty({0}), {}};
  EXPECT_NO_THROW(flat.optimizer.step(none));
}

TEST(FlatOptimizer, RefusesOptionsThatChooseNoOptimizer) {
  try {
    FlatOptimizer optimizer{Options()};
    FAIL() << "expected a ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("got no optimizer type"), std::string::npos) << error.what();
  }
}

TEST(FlatOptimizer, RefusesTensorsThatDoNotFitAndChangesNothing) {
  struct Fault {
    std::function<void(FlatTensors&)> make;
    std::vector<std::string> words;
  };
  const std::vector<Fault> faults{
      {[](FlatTensors& t) { t.master = at::Tensor(); }, {"the master", "no tensor"}},
      {[](FlatTensors& t) { t.master = t.master.to(torch::kBFloat16); }, {"the master", "BFloat16", "expected fp32,"}},
      {[](FlatTensors& t) {
         t.master = torch::randn({kElements, 2}).select(1, 0);
       },
       {"the master", "not contiguous"}},
      {[](FlatTensors& t) { t.states.pop_back(); }, {"got 1 states, expected 2", "make_states()"}},
      {[](FlatTensors& t) { t.states.push_back(t.states[0].clone()); }, {"got 3 states, expected 2"}},
      {[](FlatTensors& t) { t.states[1] = torch::zeros({kElements - 1}); },
       {"exp_avg_sq", "36 elements", "37 elements"}},
      {[](FlatTensors& t) { t.states[0] = t.states[0].to(torch::kHalf); }, {"exp_avg:", "Half", "expected fp32,"}},
      {[](FlatTensors& t) { t.states[0] = at::Tensor(); }, {"exp_avg:", "no tensor"}},
      {[](FlatTensors& t) { t.gradient = at::Tensor(); }, {"the gradient", "no tensor"}},
      {[](FlatTensors& t) { t.gradient = torch::randn({kElements + 1}); }, {"the gradient", "38 elements"}},
      {[](FlatTensors& t) { t.gradient = t.gradient.to(torch::kDouble); }, {"the gradient", "Double", "bf16 or fp16"}},
      {[](FlatTensors& t) { t.gradient = torch::randn({2 * kElements}).slice(0, 0, 2 * kElements, 2); },
       {"the gradient", "not contiguous"}},
      {[](FlatTensors& t) { t.parameter = torch::zeros({kElements}, torch::kInt); }, {"the parameter", "Int"}},
      {[](FlatTensors& t) { t.parameter = torch::zeros({1}); }, {"the parameter", "1 elements"}},
      {[](FlatTensors& t) { t.parameter = torch::zeros({kElements}, torch::kMeta); }, {"the parameter", "on meta"}},
  };
  for (std::size_t i = 0; i < faults.size(); ++i) {
    Flat flat;
    const auto kept = flat.tensors;
    const auto master = kept.master.clone(), first = kept.states[0].clone(), second = kept.states[1].clone(),
               parameter = kept.parameter.clone();
    auto bad = kept;
    faults[i].make(bad);
    try {
      flat.optimizer.step(bad);
      ADD_FAILURE() << "fault " << i << ": expected a ConfigError";
    } catch (const ConfigError& error) {
      for (const auto& words : faults[i].words)
        EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << "fault " << i << ": " << error.what();
      EXPECT_EQ(std::string(error.what()).find("[FlatOptimizer::step] got "), 0u) << error.what();
    }
    EXPECT_EQ(flat.optimizer.applied_steps(), 0) << "fault " << i;
    EXPECT_TRUE(torch::equal(kept.master, master) && torch::equal(kept.states[0], first) &&
                torch::equal(kept.states[1], second) && torch::equal(kept.parameter, parameter))
        << "fault " << i;
  }
}

}  // namespace
}  // namespace zero::flat_optimizer_test
