// Update rules of the program, in C++: at every stage and tier as a loop of libtorch, and what cannot be is refused.
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/rmsprop.h>
#include <zero/zero.h>

#include <filesystem>
#include <set>

#include "support/folder.h"
#include "support/require.h"

namespace zero::test::update_rule_test {
namespace {

constexpr double kAlpha = 0.9, kEps = 1e-3, kRate = 1e-2;

// torch::optim::RMSprop, for elements; counts what the Engine calls.
class Rms : public UpdateRule {
 public:
  std::string name() const override { return "Rms"; }
  std::vector<std::string> states(const std::string&, const std::vector<std::int64_t>&) const override {
    return {"square_avg"};
  }
  double lr() const override { return kRate; }
  void begin_step() override { ++begun; }
  void end_step() override { ++ended; }
  void update(std::span<UpdatePiece> pieces) override {
    for (auto& piece : pieces) {
      counts.insert(piece.count);
      piece.states[0].mul_(kAlpha).addcmul_(piece.gradient, piece.gradient, 1 - kAlpha);
      piece.master.addcdiv_(piece.gradient, piece.states[0].sqrt().add_(kEps), -piece.lr);
    }
  }
  int begun = 0, ended = 0;
  std::set<std::int64_t> counts;
};

// Each parameter's gradient divided by its norm: needs all of it. Matrices only; the rest as Rms.
class Normed : public Rms {
 public:
  std::string name() const override { return "Normed"; }
  Scope scope(const std::string&, const std::vector<std::int64_t>& shape) const override {
    return shape.size() == 2 ? Scope::Whole : Scope::Elements;
  }
  void update(std::span<UpdatePiece> pieces) override {
    if (pieces[0].shape.size() != 2) return Rms::update(pieces);
    for (auto& piece : pieces) {
      EXPECT_EQ(piece.master.sizes().vec(), piece.shape);
      updated.insert(piece.parameter);
      piece.states[0].add_(piece.gradient);
      piece.master.sub_(piece.states[0], piece.lr / piece.states[0].norm().item<double>());
    }
  }
  std::set<std::string> updated;
};

torch::nn::Sequential make_model() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(8, 33), torch::nn::Tanh(), torch::nn::Linear(33, 5));
}

at::Tensor loss_of(torch::nn::Sequential model, int rank, int step) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 + 10 * step + rank));
  return model->forward(at::randn({4, 8}, generator).to(model->parameters()[0].scalar_type())).square().mean();
}

Options options(const std::string& zero, const std::string& more = "") {
  return Options::from_json(R"({"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "zero_optimization": )" +
                            zero + more + "}");
}

struct Result {
  std::map<std::string, at::Tensor> masters;
  std::string hash;
  std::set<std::string> updated;  // by the rank with this number, of whole parameters
};

template <class Rule>
std::vector<Result> train(int world, const Options& given, int steps = 5) {
  std::vector<torch::nn::Sequential> models;
  for (int rank = 0; rank < world; ++rank) models.push_back(make_model());
  std::vector<Result> results(static_cast<std::size_t>(world));
  run_ranks(world, [&](std::shared_ptr<Communicator> comm) {
    const auto r = static_cast<std::size_t>(comm->rank());
    auto rule = std::make_shared<Rule>();
    Engine engine(models[r], given, comm, rule);
    for (int step = 0; step < steps; ++step) {
      engine.backward(loss_of(models[r], comm->rank(), step));
      engine.step();
    }
    engine.flush();
    EXPECT_EQ(rule->begun, steps);
    EXPECT_EQ(rule->ended, steps);
    if (!rule->counts.empty()) EXPECT_EQ(*rule->counts.rbegin(), steps);
    results[r].masters = engine.full_state_dict();
    results[r].hash = engine.state_hash();
    if constexpr (std::is_same_v<Rule, Normed>) results[r].updated = rule->updated;
  });
  return results;
}

// One process with the mean loss of all ranks.
std::map<std::string, at::Tensor> plain(int world, bool normed) {
  auto model = make_model();
  std::map<std::string, at::Tensor> sums;
  std::vector<at::Tensor> by_rms;
  for (const auto& p : model->named_parameters())
    if (!normed || p.value().dim() != 2) by_rms.push_back(p.value());
  torch::optim::RMSprop rms(by_rms, torch::optim::RMSpropOptions(kRate).alpha(kAlpha).eps(kEps));
  for (int step = 0; step < 5; ++step) {
    model->zero_grad();
    for (int rank = 0; rank < world; ++rank) (loss_of(model, rank, step) / world).backward();
    rms.step();
    const at::NoGradGuard no_grad;
    for (auto& p : model->named_parameters()) {
      if (!normed || p.value().dim() != 2) continue;
      auto& sum = sums.try_emplace(p.key(), at::zeros_like(p.value())).first->second;
      sum.add_(p.value().grad());
      p.value().sub_(sum, kRate / sum.norm().item<double>());
    }
  }
  std::map<std::string, at::Tensor> result;
  for (const auto& p : model->named_parameters()) result[p.key()] = p.value().detach();
  return result;
}

void expect_close(const std::map<std::string, at::Tensor>& found, const std::map<std::string, at::Tensor>& expected,
                  const std::string& where) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, value] : expected)
    EXPECT_LT((found.at(name) - value).abs().max().item<double>(), 2e-6) << name << " " << where;
}

TEST(UpdateRule, ElementsFollowALoopOfLibtorchAtEveryStageAndTier) {
  const TempFolder folder;
  for (const int world : {1, 2, 3}) {
    std::set<std::string> hashes;
    const auto expected = plain(world, false);
    for (const std::string zero : {R"({"stage": 0})", R"({"stage": 1})", R"({"stage": 2})", R"({"stage": 3})",
                                   R"({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}})"}) {
      const auto found = train<Rms>(world, options(zero));
      expect_close(found[0].masters, expected, zero);
      hashes.insert(found[0].hash);
    }
    const auto in_file = train<Rms>(world, options(R"({"stage": 3, "sub_group_size": 100, "offload_optimizer":
        {"device": "nvme", "nvme_path": ")" + folder.path().string() +
                                                   R"("}})"));
    hashes.insert(in_file[0].hash);
    EXPECT_EQ(hashes.size(), 1u) << world;
  }
}

TEST(UpdateRule, ADelayedUpdateRunsInTheBackground) {
  const auto late = options(R"({"stage": 1, "offload_optimizer": {"device": "cpu"}, "delayed_update":
      {"enabled": true, "start_step": 100}})");
  const auto delayed = options(R"({"stage": 1, "offload_optimizer": {"device": "cpu"}, "delayed_update":
      {"enabled": true, "start_step": 1}})");
  const auto now = train<Rms>(2, options(R"({"stage": 1})"));
  EXPECT_EQ(train<Rms>(2, late)[0].hash, now[0].hash);
  EXPECT_NE(train<Rms>(2, delayed)[0].hash, now[0].hash);
}

TEST(UpdateRule, WholeParametersFollowTheLoopAndHaveOneOwner) {
  for (const int world : {1, 2, 3}) {
    std::set<std::string> hashes;
    const auto expected = plain(world, true);
    for (const std::string zero : {R"({"stage": 0})", R"({"stage": 1})", R"({"stage": 2})", R"({"stage": 3})",
                                   R"({"stage": 3, "offload_optimizer": {"device": "cpu"}})"}) {
      const auto found = train<Normed>(world, options(zero));
      expect_close(found[0].masters, expected, zero);
      hashes.insert(found[0].hash);
      std::multiset<std::string> all;
      for (const auto& rank : found) all.insert(rank.updated.begin(), rank.updated.end());
      EXPECT_EQ(all, (std::multiset<std::string>{"0.weight", "2.weight"})) << zero;
    }
    EXPECT_EQ(hashes.size(), 1u) << world;
  }
}

TEST(UpdateRule, RecipesCastMastersOnce) {
  for (const std::string recipe :
       {R"(, "bf16": {"enabled": true})", R"(, "fp16": {"enabled": true, "initial_scale_power": 4})"}) {
    std::set<std::string> hashes;
    for (const int stage : {0, 1, 2, 3}) {
      const auto given = options(R"({"stage": )" + std::to_string(stage) + "}", recipe);
      hashes.insert(train<Normed>(2, given)[0].hash);
    }
    EXPECT_EQ(hashes.size(), 1u) << recipe;
  }
}

TEST(UpdateRule, ARunThatIsResumedEndsAsOneThatWasNot) {
  const TempFolder folder;
  const auto whole = train<Normed>(2, options(R"({"stage": 3})"), 6);
  std::vector<torch::nn::Sequential> models{make_model(), make_model()};
  std::string hash;
  for (int part = 0; part < 2; ++part)
    run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      auto model = models[static_cast<std::size_t>(comm->rank())];
      Engine engine(model, options(part == 0 ? R"({"stage": 1})" : R"({"stage": 3})"), comm,
                    std::make_shared<Normed>());
      if (part == 1) engine.load_checkpoint(folder.path());
      for (int step = 3 * part; step < 3 * part + 3; ++step) {
        engine.backward(loss_of(model, comm->rank(), step));
        engine.step();
      }
      if (part == 0) engine.save_checkpoint(folder.path(), "at3");
      const auto found = engine.state_hash();
      if (comm->rank() == 0) hash = found;
      EXPECT_NO_THROW(engine.parameter_state("0.weight", "square_avg"));
    });
  EXPECT_EQ(hash, whole[0].hash);
}

TEST(UpdateRule, AFrozenParameterCountsNoUpdates) {
  auto model = make_model();
  run_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    auto rule = std::make_shared<Rms>();
    Engine engine(model, options(R"({"stage": 1})"), comm, rule);
    auto frozen = model->named_parameters()["0.bias"];
    for (int step = 0; step < 3; ++step) {
      frozen.requires_grad_(step != 1);
      const auto before = frozen.detach().clone();
      rule->counts.clear();
      engine.backward(loss_of(model, 0, step));
      engine.step();
      EXPECT_EQ(at::equal(before, frozen.detach()), step == 1);
      EXPECT_EQ(rule->counts, step == 2 ? (std::set<std::int64_t>{2, 3}) : std::set<std::int64_t>{step + 1});
    }
  });
}

class Named : public Rms {
 public:
  Named(std::string name, std::vector<std::string> states, double lr)
      : name_(std::move(name)), states_(std::move(states)), lr_(lr) {}
  std::string name() const override { return name_; }
  std::vector<std::string> states(const std::string&, const std::vector<std::int64_t>&) const override {
    return states_;
  }
  double lr() const override { return lr_; }
  std::uint64_t choices() const override { return chosen; }
  std::uint64_t chosen = 0;

 private:
  std::string name_;
  std::vector<std::string> states_;
  double lr_;
};

TEST(UpdateRule, WhatCannotBeIsRefusedInWords) {
  run_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    const auto made = [&](std::shared_ptr<UpdateRule> rule, const Options& given) {
      torch::nn::Sequential model(torch::nn::Linear(64, 128));  // enough to be divided between tiers
      return message_of<ConfigError>([&] { Engine(model, given, comm, std::move(rule)); });
    };
    const auto plain = options(R"({"stage": 1})");
    using Names = std::vector<std::string>;
    EXPECT_EQ(made(std::make_shared<Named>("", Names{"a", "a", "master"}, -1), plain),
              "[UpdateRule] name: got none; lr: got -1, expected a finite number of at least 0; states: got \"a\", "
              "expected names that differ, without blanks, not \"master\"; states: got \"master\", expected names "
              "that differ, without blanks, not \"master\"");
    EXPECT_NE(made(std::make_shared<Named>("Many", Names{"1", "2", "3", "4", "5", "6", "7", "8", "9"}, 0), plain)
                  .find("got 9 names, expected up to 8"),
              std::string::npos);
    EXPECT_NE(made(std::make_shared<Rms>(), options(R"({"stage": 1})", R"(, "optimizer": {"type": "AdamW"})"))
                  .find("got an optimizer of the program, Rms, and optimizer.type in the configuration"),
              std::string::npos);
    for (const std::string zero : {R"({"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}})",
                                   R"({"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}})"})
      EXPECT_NE(made(std::make_shared<Normed>(), options(zero)).find("its states are offloaded in parts"),
                std::string::npos)
          << zero;
    EXPECT_NE(made(std::make_shared<Normed>(), options(R"({"stage": 1, "offload_optimizer": {"device": "cpu"},
                   "delayed_update": {"enabled": true}})"))
                  .find("delayed_update is on"),
              std::string::npos);
  });
}

TEST(UpdateRule, RanksCompareWhatTheyChoose) {
  std::vector<torch::nn::Sequential> models{make_model(), make_model()};
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto rule = std::make_shared<Named>("Chosen", std::vector<std::string>{"square_avg"}, kRate);
    rule->chosen = static_cast<std::uint64_t>(comm->rank());
    auto model = models[static_cast<std::size_t>(comm->rank())];
    Engine engine(model, options(R"({"stage": 1})"), comm, rule);
    engine.backward(loss_of(model, comm->rank(), 0));
    EXPECT_NE(message_of<ConfigError>([&] {
                engine.step();
              }).find("or other numbers of the program's optimizer, on rank 0 than on"),
              std::string::npos);
  });
  run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    const auto name = "Rule" + std::to_string(comm->rank());
    auto rule = std::make_shared<Named>(name, std::vector<std::string>{"square_avg"}, kRate);
    EXPECT_NE(message_of<ConfigError>([&] {
                Engine(make_model(), options(R"({"stage": 1})"), comm, rule);
              }).find("optimizer of the program = Rule"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace zero::test::update_rule_test
