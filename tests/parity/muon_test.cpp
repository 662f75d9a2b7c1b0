// optimizer.type Muon: at every stage as a plain loop of libtorch, in the memory of its states, and resumed.
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <zero/zero.h>

#include <filesystem>
#include <set>

#include "support/folder.h"
#include "support/require.h"

namespace zero::test::muon_test {
namespace {

constexpr int kSteps = 6;

// A table, a tall, a wide and a stacked matrix, an output by name, vectors.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(3);
    table = register_module("table", torch::nn::Embedding(11, 8));
    up = register_module("up", torch::nn::Linear(8, 33));
    down = register_module("down", torch::nn::Linear(33, 6));
    mix = register_parameter("mix", at::randn({3, 2, 6}) * 0.3);
    head = register_module("lm_head", torch::nn::Linear(6, 5));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = down(up(table(tokens)).tanh());
    x = x + at::matmul(x, mix.reshape({6, 6}));
    return head(x);
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr}, head{nullptr};
  at::Tensor mix;
};
TORCH_MODULE(Net);

const std::set<std::string> kMatrices = {"up.weight", "down.weight", "mix"};

at::Tensor loss_of(Net& model, int rank, int step) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 + 10 * step + rank));
  const auto tokens = at::randint(11, {4, 3}, generator, at::kLong);
  return model->forward(tokens).square().mean();
}

constexpr const char* kOptimizer = R"(, "optimizer": {"type": "Muon", "params": {"lr": 0.05, "adam_lr": 0.003,
    "weight_decay": 0.1, "momentum": 0.9, "betas": [0.8, 0.95], "eps": 1e-8, "ns_method": "gram"}})";

Options options(const std::string& zero, const std::string& more = "") {
  return Options::from_json(R"({"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "zero_optimization": )" +
                            zero + kOptimizer + more + "}");
}

struct Result {
  std::map<std::string, at::Tensor> masters;
  std::string hash;
  std::uint64_t state_bytes = 0;
};

std::vector<Result> train(int world, const Options& given, int steps = kSteps) {
  std::vector<Net> models;
  for (int rank = 0; rank < world; ++rank) models.emplace_back();
  std::vector<Result> results(static_cast<std::size_t>(world));
  run_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    const auto r = static_cast<std::size_t>(comm->rank());
    Engine engine(models[r], given, comm);
    for (int step = 0; step < steps; ++step) {
      engine.backward(loss_of(models[r], comm->rank(), step));
      engine.step();
    }
    engine.flush();
    results[r].masters = engine.full_state_dict();
    results[r].hash = engine.state_hash();
    for (const auto tier : {MemoryReport::Tier::Device, MemoryReport::Tier::Host})
      results[r].state_bytes += engine.memory().current(tier, MemoryReport::Purpose::OptimizerStates);
  });
  return results;
}

// Muon as its author writes it, in fp64, over the mean loss of all ranks; torch's AdamW for the rest.
std::map<std::string, at::Tensor> plain(int world) {
  Net model;
  std::map<std::string, at::Tensor> means;
  std::vector<at::Tensor> others;
  for (const auto& p : model->named_parameters())
    if (!kMatrices.contains(p.key())) others.push_back(p.value());
  torch::optim::AdamW adam(others, torch::optim::AdamWOptions(0.003).betas({0.8, 0.95}).eps(1e-8).weight_decay(0.1));
  for (int step = 0; step < kSteps; ++step) {
    model->zero_grad();
    for (int rank = 0; rank < world; ++rank) (loss_of(model, rank, step) / world).backward();
    adam.step();
    const at::NoGradGuard no_grad;
    for (auto& p : model->named_parameters()) {
      if (!kMatrices.contains(p.key())) continue;
      const auto g = p.value().grad().to(at::kDouble);
      auto& mean = means.try_emplace(p.key(), at::zeros_like(g)).first->second;
      mean = mean * 0.9 + g * (1 - 0.9);
      auto x = (g * (1 - 0.9) + mean * 0.9).reshape({g.size(0), -1});
      const double rows = static_cast<double>(x.size(0)), columns = static_cast<double>(x.size(1));
      if (rows > columns) x = x.t();
      x = x / x.norm();
      for (int k = 0; k < 5; ++k) {
        const auto a = x.mm(x.t());
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a.mm(a)).mm(x);
      }
      if (rows > columns) x = x.t();
      const double scale = std::sqrt(std::max(1.0, rows / columns));
      p.value().mul_(1 - 0.05 * 0.1).sub_(x.reshape(g.sizes()).to(at::kFloat), 0.05 * scale);
    }
  }
  std::map<std::string, at::Tensor> result;
  for (const auto& p : model->named_parameters()) result[p.key()] = p.value().detach();
  return result;
}

TEST(Muon, FollowsAPlainLoopAtEveryStageAndOnTheHost) {
  for (const int world : {1, 2, 3}) {
    std::set<std::string> hashes;
    const auto expected = plain(world);
    for (const std::string zero : {R"({"stage": 0})", R"({"stage": 1})", R"({"stage": 2})", R"({"stage": 3})",
                                   R"({"stage": 3, "offload_optimizer": {"device": "cpu"}})"}) {
      const auto found = train(world, options(zero))[0];
      for (const auto& [name, value] : expected)
        EXPECT_LT((found.masters.at(name) - value).abs().max().item<double>(), 2e-5) << name << " " << zero;
      hashes.insert(found.hash);
    }
    EXPECT_EQ(hashes.size(), 1u) << world;
  }
}

TEST(Muon, BitsAreEqualOverStagesInSixteenBits) {
  std::set<std::string> hashes;
  for (const std::string stage : {"0", "1", "2", "3"})
    hashes.insert(train(2, options(R"({"stage": )" + stage + "}", R"(, "bf16": {"enabled": true})"))[0].hash);
  EXPECT_EQ(hashes.size(), 1u);
}

// One state for an element of a matrix, two for the others; a shard has up to its padding more.
TEST(Muon, HasTheStatesOfEachKind) {
  Net model;
  std::uint64_t states = 0;
  for (const auto& p : model->named_parameters())
    states += static_cast<std::uint64_t>(p.value().numel()) * (kMatrices.contains(p.key()) ? 1 : 2);
  const auto alone = train(1, options(R"({"stage": 1})"), 1)[0].state_bytes;
  EXPECT_GE(alone, 4 * states);
  EXPECT_LE(alone, 4 * (states + 9 * 2 * 15));  // parameters begin at multiples of 16
  const auto shards = train(3, options(R"({"stage": 3})"), 1);
  for (const auto& rank : shards) {
    EXPECT_GE(3 * rank.state_bytes, 4 * states);
    EXPECT_LE(rank.state_bytes, 4 * states / 3 + 4 * 3 * 64);  // three units
  }
}

TEST(Muon, AResumedRunEndsAsOneThatWasNot) {
  const TempFolder folder;
  const auto whole = train(2, options(R"({"stage": 3})"));
  std::vector<Net> models{Net(), Net()};
  std::string hash;
  for (int part = 0; part < 2; ++part)
    run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      auto& model = models[static_cast<std::size_t>(comm->rank())];
      Engine engine(model, options(part == 0 ? R"({"stage": 1})" : R"({"stage": 3})"), comm);
      if (part == 1) engine.load_checkpoint(folder.path());
      for (int step = 3 * part; step < 3 * part + 3; ++step) {
        engine.backward(loss_of(model, comm->rank(), step));
        engine.step();
      }
      if (part == 0) engine.save_checkpoint(folder.path(), "at3");
      const auto found = engine.state_hash();
      if (comm->rank() == 0) hash = found;
      EXPECT_NO_THROW(engine.parameter_state("up.weight", "momentum_buffer"));
      EXPECT_THROW(engine.parameter_state("up.weight", "exp_avg"), ConfigError);
      EXPECT_NO_THROW(engine.parameter_state("up.bias", "exp_avg_sq"));
      EXPECT_EQ(engine.state_names("mix"), (std::vector<std::string>{"momentum_buffer"}));
      EXPECT_EQ(engine.state_names("table.weight"), (std::vector<std::string>{"exp_avg", "exp_avg_sq"}));
    });
  EXPECT_EQ(hash, whole[0].hash);
}

// The first update of AdamW moves each element by the rate.
TEST(Muon, TheOtherRateFollowsTheScheduleAndAGroupHasItsOwn) {
  const auto moved = [](const std::string& more, const std::string& name, double rate) {
    Net model;
    const auto before = model->named_parameters()[name].detach().clone();
    run_ranks(1, [&](std::shared_ptr<Communicator> comm) {
      Engine engine(model, options(R"({"stage": 1})", more), comm);
      if (rate > 0) engine.set_lr(0, rate);
      engine.backward(loss_of(model, 0, 0));
      engine.step();
    });
    return (model->named_parameters()[name].detach() - before * (1 - 0.0)).abs().max().item<double>();
  };
  const std::string no_decay = R"(, "libzero.parameter_groups": [{"pattern": "*", "weight_decay": 0)";
  EXPECT_NEAR(moved(no_decay + "}]", "up.bias", 0), 0.003, 1e-5);
  EXPECT_NEAR(moved(no_decay + R"(, "lr": 0.01}])", "up.bias", 0), 0.01, 1e-5);
  EXPECT_NEAR(moved("", "up.bias", 0.1), 0.006, 1e-3);
}

TEST(Muon, WhatCannotBeIsRefusedInWords) {
  const TempFolder folder;
  run_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    const auto fault = [&](const std::string& zero, const std::string& more) {
      return message_of<ConfigError>([&] { Engine(Net(), options(zero, more), comm); });
    };
    EXPECT_NE(fault(R"({"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": ")" + folder.path().string() +
                        R"("}})",
                    "")
                  .find("by Muon, which needs whole parameters: its states are offloaded in parts"),
              std::string::npos);
    EXPECT_NE(fault(R"({"stage": 1})", R"(, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true})")
                  .find("got Muon with masters or optimizer states in 16 bits, expected fp32"),
              std::string::npos);
  });
  const auto zero_rate = message_of<ConfigError>(
      [] { Options::from_json(R"({"train_batch_size": 1, "optimizer": {"type": "Muon", "params": {"lr": 0}}})"); });
  EXPECT_NE(zero_rate.find("got 0 for Muon, expected a number above 0"), std::string::npos) << zero_rate;
}

}  // namespace
}  // namespace zero::test::muon_test
