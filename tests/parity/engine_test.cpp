// The engine's contract apart from numerics: clear errors on every rank, gathered scopes, evaluation, deferred
// building, parameter groups, buffers.
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>

#include "parity/training.h"
#include "support/require.h"

namespace zero::test::engine_test {
namespace {

// The error with which each rank ends.
std::vector<std::string> errors_of(int world, const std::function<void(std::shared_ptr<Communicator>)>& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(world));
  std::mutex mutex;
  try {
    ThreadFaults faults;
    faults.timeout = std::chrono::seconds(20);
    run_ranks(world, faults, [&](std::shared_ptr<Communicator> comm) {
      try {
        body(comm);
      } catch (const std::exception& e) {
        {
          std::lock_guard<std::mutex> lock(mutex);
          errors[static_cast<std::size_t>(comm->rank())] = e.what();
        }
        throw;
      }
    });
  } catch (const std::exception&) {
  }
  return errors;
}

Options options_of(int stage, const std::string& extra = "") {
  Training setup;
  setup.stage = stage;
  setup.extra = extra;
  return Options::from_json(json_of(setup));
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(EngineErrors, WritingAParameterOutsideAScope) {
  for (int stage = 0; stage <= 3; ++stage) {
    const auto errors = errors_of(2, [&](std::shared_ptr<Communicator> comm) {
      auto module = make_module(problem("mlp"));
      Engine engine(module, options_of(stage), comm);
      engine.backward(loss_of(problem("mlp"), *module, comm->rank(), 0, at::kFloat));
      engine.step();
      if (comm->rank() == 1) {
        at::NoGradGuard no_grad;
        module->parameters()[0].add_(1.0);
      }
      engine.backward(loss_of(problem("mlp"), *module, comm->rank(), 1, at::kFloat));
    });
    EXPECT_TRUE(contains(errors[1], "aten::add_ writes parameter layers.0.weight")) << errors[1];
    EXPECT_TRUE(contains(errors[1], "gathered_parameters(true)")) << errors[1];
    EXPECT_TRUE(contains(errors[0], "rank 1")) << errors[0];
    EXPECT_TRUE(contains(errors[0], "layers.0.weight")) << errors[0];
  }
}

TEST(EngineErrors, MovingTheModuleAfterwards) {
  for (const int stage : {0, 3}) {
    const auto errors = errors_of(2, [&](std::shared_ptr<Communicator> comm) {
      auto module = make_module(problem("mlp"));
      Engine engine(module, options_of(stage), comm);
      module->to(at::kDouble);
      auto generator = at::detail::createCPUGenerator(1);
      engine.backward(problem("mlp").loss(*module, generator, at::kDouble));
    });
    for (const auto& error : errors) EXPECT_TRUE(contains(error, "module.to(")) << "stage " << stage << ": " << error;
  }
}

TEST(EngineErrors, RanksWithDifferentModels) {
  const auto errors = errors_of(3, [&](std::shared_ptr<Communicator> comm) {
    auto module = make_module(problem(comm->rank() == 2 ? "gpt" : "mlp"));
    Engine engine(module, options_of(2), comm);
  });
  for (const auto& error : errors) {
    EXPECT_TRUE(contains(error, "models on rank 0 and on rank 2 differ")) << error;
  }
}

TEST(EngineErrors, RanksWithDifferentConfigurations) {
  const auto errors = errors_of(2, [&](std::shared_ptr<Communicator> comm) {
    auto module = make_module(problem("mlp"));
    Engine engine(module, options_of(2, comm->rank() == 1 ? R"(, "seed": 7)" : ""), comm);
  });
  for (const auto& error : errors) EXPECT_TRUE(contains(error, "seed")) << error;
}

TEST(EngineErrors, CallsOutOfPlace) {
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    auto module = make_module(problem("mlp"));
    const auto loss = [&] { return loss_of(problem("mlp"), *module, 0, 0, at::kFloat); };
    Engine engine(module, options_of(3), comm);
    EXPECT_TRUE(contains(message_of([&] { loss().backward(); }), "engine.backward(loss)"));
    EXPECT_TRUE(contains(message_of([&] { engine.backward(at::ones({3})); }), "3 elements"));
    engine.backward(loss());
    EXPECT_TRUE(contains(message_of([&] { engine.backward(loss()); }), "without step()"));
    engine.step();
    {
      auto scope = engine.gathered_parameters();
      EXPECT_TRUE(contains(message_of([&] { engine.step(); }), "gathered_parameters"));
    }
    EXPECT_TRUE(contains(message_of([&] { engine.set_lr(7, 0.1); }), "parameter group 7"));
  });
}

TEST(EngineErrors, ModelsThatCannotBeTaken) {
  struct Shared : torch::nn::Module {
    Shared() {
      auto whole = at::zeros({4, 4});
      register_parameter("a", whole.view({16}));
      register_parameter("b", whole.view({2, 8}));
    }
  };
  run_ranks(1, [](std::shared_ptr<Communicator> comm) {
    EXPECT_TRUE(contains(message_of([&] { Engine(std::make_shared<Shared>(), options_of(0), comm); }),
                         "shares its storage with a"));
    EXPECT_TRUE(contains(message_of([&] { Engine(std::make_shared<torch::nn::Module>(), options_of(0), comm); }),
                         "no parameters"));
    EXPECT_TRUE(contains(message_of([&] {
                           Engine(make_module(problem("mlp")), Options::from_json(R"({"train_batch_size": 2})"), comm);
                         }),
                         "optimizer"));
  });
}

TEST(EngineErrors, ClearingGradientsBetweenMicroBatches) {
  Training setup;
  setup.problem = "mlp";
  setup.accumulation = 2;
  setup.stage = 0;
  const auto& task = problem("mlp");
  auto module = make_module(task);
  Engine engine(module, Options::from_json(json_of(setup)), Communicator::local());
  engine.backward(loss_of(task, *module, 0, 0, at::kFloat));
  engine.step();
  std::vector<at::Tensor> held;  // or a new gradient might get the old one's address
  for (const auto& p : module->parameters()) held.push_back(p.grad());
  module->zero_grad();
  const auto error = message_of([&] { engine.backward(loss_of(task, *module, 0, 1, at::kFloat)); });
  EXPECT_TRUE(contains(error, "was cleared or replaced between two micro-batches") && contains(error, "zero_grad"))
      << error;
}

TEST(EngineErrors, ReadingAReleasedParameterPastTheDispatcher) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto module = make_module(problem("mlp"));
    Engine engine(module, options_of(3), comm);
    auto weight = module->parameters()[0];
    EXPECT_TRUE(contains(message_of([&] { weight.data_ptr<float>(); }), "layers.0.weight"));
    auto scope = engine.gathered_parameters();
    EXPECT_EQ(message_of([&] { weight.data_ptr<float>(); }), "");
  });
}

TEST(Engine, GatheredScopesReadAndModify) {
  for (const char* recipe : {"fp32", "bf16"}) {
    for (int stage = 0; stage <= 3; ++stage) {
      run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
        Training setup;
        setup.recipe = recipe;
        setup.stage = stage;
        auto module = make_module(problem("mlp"));
        Engine engine(module, Options::from_json(json_of(setup)), comm);
        const auto before = engine.full_state_dict();
        {
          auto scope = engine.gathered_parameters(true);
          at::NoGradGuard no_grad;
          // Every rank writes something else: rank 0's values count.
          module->parameters()[0].fill_(0.5 + comm->rank());
        }
        auto after = engine.full_state_dict();
        if (comm->rank() == 0) {
          EXPECT_TRUE(at::equal(after.at("layers.0.weight"), at::full_like(after.at("layers.0.weight"), 0.5)));
          auto untouched = before;
          untouched.erase("layers.0.weight");
          after.erase("layers.0.weight");
          EXPECT_TRUE(equal_bits(after, untouched)) << "untouched masters keep their bits";
        }
        auto scope = engine.gathered_parameters();
        EXPECT_EQ(module->parameters()[0].to(at::kFloat).max().item<float>(), 0.5f);
      });
    }
  }
}

TEST(Engine, EvaluationBetweenStepsChangesNothing) {
  for (int stage = 0; stage <= 3; ++stage) {
    std::string hashes[2];
    for (const bool evaluate : {false, true}) {
      run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
        const auto& task = problem("gpt");
        auto module = make_module(task);
        Engine engine(module, options_of(stage), comm);
        for (int step = 0; step < 4; ++step) {
          if (evaluate) {
            torch::NoGradGuard no_grad;
            for (int k = 0; k < 3; ++k)
              EXPECT_GT(loss_of(task, *module, comm->rank(), 100 + k, at::kFloat).item<float>(), 0);
          }
          engine.backward(loss_of(task, *module, comm->rank(), step, at::kFloat));
          engine.step();
        }
        const auto hash = engine.state_hash();
        if (comm->rank() == 0) hashes[evaluate] = hash;
      });
    }
    EXPECT_EQ(hashes[0], hashes[1]) << "stage " << stage;
  }
}

TEST(Engine, DeferredBuildEqualsEagerBitForBit) {
  for (const char* name : {"gpt", "batch_norm", "recurrent", "transformer", "containers", "frozen", "attention"}) {
    torch::manual_seed(11);
    auto eager = problem(name).make();
    const auto next = at::rand({3});
    for (const int stage : {0, 2, 3}) {
      run_ranks(1, [&](std::shared_ptr<Communicator> comm) {
        torch::manual_seed(11);
        const auto options = options_of(stage);
        auto module = build([&] { return problem(name).make(); });
        Engine engine(module, options, comm);
        EXPECT_TRUE(at::equal(at::rand({3}), next)) << "the generator ends where an eager build leaves it";
        const auto values = engine.full_state_dict();
        for (const auto& item : eager->named_parameters()) {
          if (values.count(item.key()) == 0) continue;  // a further name of a tied parameter
          EXPECT_TRUE(at::equal(values.at(item.key()), item.value()))
              << name << " " << item.key() << " stage " << stage;
        }
        const auto buffers = module->named_buffers();
        for (const auto& item : eager->named_buffers()) EXPECT_TRUE(at::equal(buffers[item.key()], item.value()));
      });
    }
  }
}

TEST(Engine, ADeferredParameterIsReadOnlyAfterItsEngine) {
  auto module = build([&] { return problem("gpt").make(); });
  for (const auto& parameter : module->parameters())
    EXPECT_TRUE(contains(message_of([&] { parameter.sum(); }), "construct an Engine from the module first"));
}

// libtorch seeds every C++ process at random, so ranks that never call manual_seed differ.
TEST(Engine, DeferredBuildOfRanksSeededDifferentlyTakesRankZeros) {
  torch::manual_seed(20);
  auto eager = problem("gpt").make();
  std::mutex turn;
  run_ranks(3, [&](std::shared_ptr<Communicator> comm) {
    const auto options = options_of(3);
    std::unique_lock lock(turn);
    torch::manual_seed(static_cast<std::uint64_t>(20 + comm->rank()));
    auto module = build([&] { return problem("gpt").make(); });
    lock.unlock();
    Engine engine(module, options, comm);
    const auto values = engine.full_state_dict();
    if (comm->rank() != 0) return;
    for (const auto& item : eager->named_parameters()) {
      if (values.count(item.key()) == 0) continue;  // a further name of a tied parameter
      EXPECT_TRUE(at::equal(values.at(item.key()), item.value())) << item.key();
    }
  });
}

TEST(Engine, ParameterGroupsByName) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const auto& task = problem("mlp");
    auto module = make_module(task);
    const auto options =
        options_of(3, R"(, "libzero": {"parameter_groups": [{"pattern": "*.bias", "lr": 0.0, "weight_decay": 0.0}]})");
    Engine engine(module, options, comm);
    const auto before = engine.full_state_dict();
    engine.backward(loss_of(task, *module, comm->rank(), 0, at::kFloat));
    engine.step();
    const auto after = engine.full_state_dict();
    for (const auto& [name, value] : before) {
      const bool bias = name.ends_with(".bias");
      EXPECT_EQ(at::equal(value, after.at(name)), bias) << name;
    }
  });
}

TEST(Engine, UnitsByName) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    auto module = make_module(problem("gpt"));
    Engine engine(module, options_of(3, R"(, "libzero": {"units": ["blocks.1", "norm"]})"), comm);
    std::vector<std::string> names;
    for (const auto& [name, numel] : engine.units()) names.push_back(name);
    EXPECT_EQ(names, (std::vector<std::string>{"root", "blocks.1", "norm"}));
    EXPECT_TRUE(contains(message_of([&] {
                           auto other = make_module(problem("gpt"));
                           Engine wrong(other, options_of(3, R"(, "libzero": {"units": ["blocks.9"]})"), comm);
                         }),
                         "blocks.9"));
  });
}

TEST(Engine, OverflowIsSkippedOnAllRanks) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      const auto& task = problem("mlp");
      auto module = make_module(task);
      Training setup;
      setup.stage = stage;
      setup.recipe = "fp16";
      Engine engine(module, Options::from_json(json_of(setup)), comm);
      const auto scale = engine.loss_scale();
      const auto before = engine.state_hash();
      for (int k = 0; k < 2; ++k) {
        auto loss = loss_of(task, *module, comm->rank(), k, at::kHalf);
        // All gradients; then one element, which lies in the shard of one rank.
        constexpr float kInfinity = std::numeric_limits<float>::infinity();
        if (k == 0 && comm->rank() == 1) loss = loss * kInfinity;
        if (k == 1) {
          const auto element = module->parameters()[0].flatten()[0].to(at::kFloat);
          loss = loss + element * (comm->rank() == 1 ? kInfinity : 0.0f);
        }
        engine.backward(loss);
        const auto result = engine.step();
        EXPECT_TRUE(result.overflow);
        EXPECT_FALSE(result.updated);
        EXPECT_EQ(result.grad_norm, -1);
        EXPECT_EQ(result.global_step, k + 1);
      }
      EXPECT_EQ(engine.state_hash(), before);
      EXPECT_EQ(engine.loss_scale(), scale / 2) << "hysteresis 2: the second overflow halves";
      EXPECT_EQ(engine.skipped_steps(), 2);
      engine.backward(loss_of(task, *module, comm->rank(), 5, at::kHalf));
      EXPECT_TRUE(engine.step().updated);
      EXPECT_NE(engine.state_hash(), before);
    });
  }
}

TEST(Engine, TenOverflowsInARowEndTheRun) {
  const auto errors = errors_of(2, [&](std::shared_ptr<Communicator> comm) {
    const auto& task = problem("mlp");
    auto module = make_module(task);
    Engine engine(module, options_of(2), comm);
    for (int k = 0; k < 12; ++k) {
      engine.backward(loss_of(task, *module, comm->rank(), k, at::kFloat) * std::numeric_limits<float>::quiet_NaN());
      engine.step();
    }
  });
  for (const auto& error : errors) {
    EXPECT_TRUE(contains(error, "10 steps in a row")) << error;
    EXPECT_TRUE(contains(error, "not finite on rank 0, 1. Hint")) << error;
    EXPECT_TRUE(contains(error, "layers.")) << error;
  }
}

TEST(Engine, TwoEnginesLiveInOneProcess) {
  run_ranks(2, [](std::shared_ptr<Communicator> comm) {
    const auto& task = problem("mlp");
    auto a = make_module(task), b = make_module(task);
    Engine first(a, options_of(3), comm), second(b, options_of(1), comm);
    for (int step = 0; step < 3; ++step) {
      first.backward(loss_of(task, *a, comm->rank(), step, at::kFloat));
      second.backward(loss_of(task, *b, comm->rank(), step, at::kFloat));
      first.step();
      second.step();
    }
    EXPECT_EQ(first.state_hash(), second.state_hash());
  });
}

TEST(Engine, UnmanagedAccumulation) {
  for (int stage = 0; stage <= 3; ++stage) {
    run_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      const auto& task = problem("mlp");
      auto module = make_module(task);
      Engine engine(module, options_of(stage, R"(, "managed_gradient_accumulation": false)"), comm);
      EXPECT_FALSE(engine.step().updated);
      for (int micro = 0; micro < 3; ++micro) engine.backward(loss_of(task, *module, comm->rank(), micro, at::kFloat));
      const auto result = engine.step();
      EXPECT_TRUE(result.updated);
      EXPECT_GT(result.grad_norm, 0);
    });
  }
}

}  // namespace
}  // namespace zero::test::engine_test
