// Gradients that a program replaces between backward() and step(), compared with a plain loop that replaces .grad, and
// gradients of a sum over tokens, compared with a loop over the tokens of all ranks.
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>
#include <zero/library.h>

#include <cmath>
#include <filesystem>
#include <map>

#include "parity/problems.h"
#include "support/shm_threads.h"

namespace zero::test::gradients_test {
namespace {

constexpr double kClip = 0.5, kRate = 0.1;
constexpr int kSteps = 3;

struct NetImpl : torch::nn::Module {
  NetImpl() { fill_parameters(*this, 7); }
  at::Tensor forward(const at::Tensor& x) { return out(in(x).relu()); }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(64, 48))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(48, 7))};
  torch::nn::Linear unused{register_module("unused", torch::nn::Linear(5, 3))};  // no loss reaches it
};
TORCH_MODULE(Net);

at::Tensor input() { return at::linspace(-1, 1, 128).view({2, 64}); }

at::Tensor values_of(const at::Tensor& parameter, int step) {
  return at::linspace(-1, 2, parameter.numel()).view(parameter.sizes()) * std::pow(2.0, -step);
}

struct Case {
  int world, stage;
  std::string recipe, zero;  // JSON, each with a leading comma
  bool shm = false;          // ranks read each other's gradients in place
  void run(const std::function<void(std::shared_ptr<Communicator>)>& body) const {
    shm ? with_shm_threads(world, body) : run_ranks(world, body);
  }
  Options options() const {
    return Options::from_json(R"({"train_micro_batch_size_per_gpu": 2, "gradient_clipping": )" + std::to_string(kClip) +
                              R"(, "optimizer": {"type": "AdamW", "params": {"lr": )" + std::to_string(kRate) +
                              R"(, "weight_decay": 0.01}}, "zero_optimization": {"stage": )" + std::to_string(stage) +
                              zero + "}" + recipe + "}");
  }
  std::string text() const { return base() + ", stage " + std::to_string(stage) + zero + (shm ? ", shm" : ""); }
  std::string base() const { return "world " + std::to_string(world) + recipe; }
};

std::vector<Case> cases(const std::vector<std::string>& recipes) {
  const std::string cpu = R"(, "offload_optimizer": {"device": "cpu"})";
  const auto nvme = R"(, "offload_optimizer": {"device": "nvme", "nvme_path": ")" +
                    std::filesystem::temp_directory_path().string() + "\"}";
  std::vector<Case> result;
  for (const auto& recipe : recipes)
    for (const auto& [world, shm] : {std::pair(1, false), std::pair(2, false), std::pair(2, true)})
      for (const auto& [stage, zero] : std::vector<std::pair<int, std::string>>{
               {0, ""}, {1, ""}, {1, cpu}, {2, ""}, {2, cpu}, {3, ""}, {3, cpu}, {3, nvme}})
        result.push_back({world, stage, recipe, zero, shm});
  return result;
}

// Rank r's loss is a sum over its first tokens[r] rows. The gradient is that of one process with all rows.
TEST(Tokens, WeighRanksByTheirNumber) {
  const auto rows = [](int rank) { return at::linspace(-1 - rank, 1, 6 * 64).view({6, 64}); };
  const auto loss_of = [&](Net& net, int rank, std::int64_t tokens) {
    return net(rows(rank)).pow(2).narrow(0, 0, tokens).sum();
  };
  for (const auto& tokens : std::vector<std::vector<std::int64_t>>{{5, 3}, {6, 0}, {0, 0}}) {
    const std::int64_t all = tokens[0] + tokens[1];
    Net plain;
    auto mean = loss_of(plain, 0, tokens[0]) + loss_of(plain, 1, tokens[1]);
    (all > 0 ? mean / static_cast<double>(all) : mean).backward();
    for (const std::string keys : {R"("gradient_accumulation_steps": 1)", R"("gradient_accumulation_steps": 2)",
                                   R"("gradient_allreduce_op": "sum")"}) {
      const int accumulation = keys.ends_with("2") ? 2 : 1;
      for (int stage = 0; stage < 4; ++stage) {
        const auto options =
            Options::from_json(R"({"train_micro_batch_size_per_gpu": 6, "optimizer": {"type": "SGD"}, )" + keys +
                               R"(, "zero_optimization": {"stage": )" + std::to_string(stage) + "}}");
        run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
          Net net;
          Engine engine(net, options, comm);
          const auto own = tokens[static_cast<std::size_t>(comm->rank())];
          EXPECT_THROW(engine.backward(loss_of(net, 0, 1), {.tokens = -1}), ConfigError);
          for (int i = 0; i < accumulation; ++i) {
            engine.backward(loss_of(net, comm->rank(), own), {.tokens = own});
            if (i + 1 < accumulation) engine.step();
          }
          for (const auto& name : {"in.weight", "out.bias"}) {
            const auto expected = plain->named_parameters()[name].grad();
            EXPECT_LT((engine.gradient(name) - expected).abs().max().item<float>(), 1e-5)
                << name << ", stage " << stage << ", " << keys << ", tokens " << tokens[0] << " and " << tokens[1];
          }
          if (all > 0) EXPECT_GT(engine.gradient("in.weight").abs().max().item<float>(), 0.01);
          engine.step();
        });
      }
    }
  }
}

// The gradients of in.weight and unused.weight are replaced whole, that of out.weight by shards.
TEST(SetGradient, IsWhatTheStepClipsAndUses) {
  Net plain;
  torch::optim::AdamW adamw(plain->parameters(), torch::optim::AdamWOptions(kRate).weight_decay(0.01));
  std::vector<double> norms;
  for (int step = 0; step < kSteps; ++step) {
    plain->zero_grad(/*set_to_none=*/true);
    plain(input()).pow(2).mean().backward();
    plain->unused->bias.mutable_grad() = at::zeros_like(plain->unused->bias);
    for (const auto& weight : {plain->in->weight, plain->out->weight, plain->unused->weight})
      weight.mutable_grad() = values_of(weight, step);
    norms.push_back(torch::nn::utils::clip_grad_norm_(plain->parameters(), kClip));
    adamw.step();
  }
  const auto expected = plain->named_parameters();
  std::map<std::string, std::string> hashes;
  for (const auto& one : cases({"", R"(, "communication_data_type": "bf16")"})) {
    SCOPED_TRACE(one.text());
    const bool rounds = !one.recipe.empty();
    one.run([&](std::shared_ptr<Communicator> comm) {
      Net net;
      Engine engine(net, one.options(), comm);
      for (int step = 0; step < kSteps; ++step) {
        engine.backward(net(input()).pow(2).mean());
        for (const auto* name : {"in.weight", "unused.weight"}) {
          const auto values = values_of(expected[name], step);
          engine.set_gradient(name, comm->rank() == 0 ? values : at::full_like(values, NAN));  // rank 0's
          EXPECT_TRUE(at::equal(engine.gradient(name), values));
        }
        const auto own = engine.own_gradient("out.weight");
        const auto flat = values_of(expected["out.weight"], step).view({-1});
        engine.set_own_gradient("out.weight", flat.narrow(0, own.begin, own.values.numel()));
        EXPECT_TRUE(at::equal(engine.gradient("out.weight").view({-1}), flat));
        const auto result = engine.step();
        EXPECT_NEAR(result.grad_norm / norms[static_cast<std::size_t>(step)], 1, rounds ? 1e-4 : 1e-6);
      }
      const auto hash = engine.state_hash();
      if (comm->rank() == 0) {
        const auto first = hashes.emplace(one.base(), hash).first->second;
        EXPECT_EQ(hash, first) << "other bits than those of the first stage";
      }
      for (const auto& [name, value] : engine.full_state_dict())
        EXPECT_TRUE(at::allclose(value, expected[name], rounds ? 1e-3 : 1e-5, rounds ? 1e-3 : 1e-6)) << name;
    });
  }
}

// fp16 gradients are stored scaled, bf16 ones rounded; sums are in fp32 where communication_data_type says so.
TEST(SetGradient, HasOneRoundingInEveryRecipe) {
  std::map<std::string, std::string> hashes;
  const std::map<std::string, at::ScalarType> recipes{
      {R"(, "bf16": {"enabled": true})", at::kBFloat16},
      {R"(, "bf16": {"enabled": true}, "communication_data_type": "fp32")", at::kBFloat16},
      {R"(, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"})", at::kFloat},
      {R"(, "fp16": {"enabled": true, "initial_scale_power": 8}, "gradient_predivide_factor": 2)", at::kHalf}};
  std::vector<std::string> texts;
  for (const auto& [text, dtype] : recipes) texts.push_back(text);
  for (const auto& one : cases(texts)) {
    SCOPED_TRACE(one.text());
    one.run([&](std::shared_ptr<Communicator> comm) {
      Net net;
      const auto dtype = recipes.at(one.recipe);
      const auto values = values_of(net->in->weight, 0);
      Engine engine(net, one.options(), comm);
      for (int step = 0; step < kSteps; ++step) {
        engine.backward(net(input().to(net->in->weight.scalar_type())).pow(2).mean());
        const auto others = engine.gradient("out.weight").pow(2).sum() + engine.gradient("out.bias").pow(2).sum() +
                            engine.gradient("in.bias").pow(2).sum();
        engine.set_gradient("in.weight", values);
        const auto stored = values.to(dtype).to(at::kFloat);
        EXPECT_TRUE(at::allclose(engine.gradient("in.weight"), stored, 1e-3, 1e-6));
        const auto result = engine.step();
        EXPECT_TRUE(result.updated);
        EXPECT_NEAR(result.grad_norm, std::sqrt((others + stored.pow(2).sum()).item<double>()),
                    1e-3 * result.grad_norm);
      }
      const auto hash = engine.state_hash();
      if (comm->rank() == 0) EXPECT_EQ(hash, hashes.emplace(one.base(), hash).first->second);
    });
  }
}

// Nothing is discarded after complete micro-batches: norm and update are those of a run without the call.
TEST(Gradient, IsWholeAfterADiscardOfNothing) {
  for (const auto& one : cases({"", R"(, "bf16": {"enabled": true})"})) {
    SCOPED_TRACE(one.text());
    one.run([&](std::shared_ptr<Communicator> comm) {
      std::vector<std::string> hashes;
      std::vector<double> norms;
      for (const bool discards : {false, true}) {
        Net net;
        Engine engine(net, one.options(), comm);
        engine.backward(net(input().to(net->in->weight.scalar_type())).pow(2).mean());
        if (discards) EXPECT_EQ(engine.discard_micro_batch(), 1);
        norms.push_back(engine.step().grad_norm);
        hashes.push_back(engine.state_hash());
      }
      EXPECT_GT(norms[0], kClip);
      EXPECT_EQ(norms[1], norms[0]);
      EXPECT_EQ(hashes[1], hashes[0]);
    });
  }
}

// Where the program ends the accumulation, reading a gradient does.
TEST(Gradient, EndsAnAccumulationOfUnknownLength) {
  constexpr int kMicroBatches = 3;
  Net plain;
  for (int k = 0; k < kMicroBatches; ++k) (plain(input() * (k + 1)).pow(2).mean() / kMicroBatches).backward();
  for (const auto& one : cases({R"(, "gradient_accumulation_steps": 3, "managed_gradient_accumulation": false)"})) {
    SCOPED_TRACE(one.text());
    one.run([&](std::shared_ptr<Communicator> comm) {
      std::vector<std::string> hashes;
      for (const bool reads : {false, true}) {
        Net net;
        Engine engine(net, one.options(), comm);
        EXPECT_THROW(engine.gradient("in.weight"), ConfigError) << "before the first micro-batch";
        for (int step = 0; step < 2; ++step) {
          for (int k = 0; k < kMicroBatches; ++k) engine.backward(net(input() * (k + 1)).pow(2).mean());
          if (reads) {
            EXPECT_THROW(engine.own_gradient("in.weight"), ConfigError) << "it cannot reduce: it is local";
            const auto gradient = engine.gradient("in.weight");
            if (step == 0) EXPECT_TRUE(at::allclose(gradient, plain->in->weight.grad(), 1e-5, 1e-7));
            const auto own = engine.own_gradient("in.weight");
            EXPECT_TRUE(at::equal(own.values.cpu(), gradient.view({-1}).narrow(0, own.begin, own.values.numel())));
            const auto loss = net(input()).pow(2).mean();
            EXPECT_THROW(engine.backward(loss), ConfigError) << "the sum is complete";
            EXPECT_EQ(engine.discard_micro_batch(), kMicroBatches);
          }
          EXPECT_TRUE(engine.step().updated);
        }
        hashes.push_back(engine.state_hash());
      }
      EXPECT_EQ(hashes[1], hashes[0]);
    });
  }
}

TEST(SetGradient, IsRefusedOnEveryRankAndTheStepContinues) {
  for (const int stage : {0, 3})
    run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      Net net;
      net->in->bias.requires_grad_(false);
      Engine engine(net, Case{2, stage, "", ""}.options(), comm);
      const auto refused = [&](const std::string& text, const std::string& name, const at::Tensor& values) {
        try {
          engine.set_gradient(name, values);
          ADD_FAILURE() << "expected: " << text;
        } catch (const ConfigError& error) {
          EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
        }
      };
      const auto fits = at::ones({48, 64});
      refused("expected between the last backward() and step()", "in.weight", fits);
      engine.backward(net(input()).pow(2).mean());
      const auto before = engine.gradient("in.weight");
      refused("for in.weight, expected floating-point values of shape [48, 64]", "in.weight",
              comm->rank() == 1 ? at::ones({3}) : fits);
      refused("got CPULongType[48, 64]", "in.weight", fits.to(at::kLong));
      refused("an undefined tensor", "in.weight", {});
      refused("in.bias has no gradient: it is frozen", "in.bias", at::ones({48}));
      refused("the gradient to replace", comm->rank() == 1 ? "out.weight" : "out.bias",
              at::ones(comm->rank() == 1 ? at::IntArrayRef{7, 48} : at::IntArrayRef{7}));
      EXPECT_THROW(engine.set_own_gradient("in.weight", at::ones({1})), ConfigError);
      EXPECT_TRUE(at::equal(engine.gradient("in.weight"), before));
      EXPECT_TRUE(engine.step().updated);
    });
}

}  // namespace
}  // namespace zero::test::gradients_test
