// Tensor parallelism in odd but legal programs: evaluations between steps, recomputation, several Engines, uneven
// parts, and ranks that do not do the same.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>
#include <zero/library.h>

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>

#include <cmath>
#include <limits>

#include "examples/megatron_gpt.h"
#include "parity/mesh_problems.h"
#include "support/folder.h"
#include "support/require.h"

namespace zero::test::tensor_parallel_soundness_test {
namespace {

using namespace zero::test::mesh;
using Comm = std::shared_ptr<Communicator>;

// Two products with what is between them; `body` is the forward.
struct PairImpl : torch::nn::Module {
  torch::nn::Linear up{nullptr}, down{nullptr};
  std::function<at::Tensor(PairImpl&, const at::Tensor&)> body = [](PairImpl& m, const at::Tensor& x) {
    return m.down(torch::tanh(m.up(x)));
  };
  PairImpl() {
    up = register_module("up", torch::nn::Linear(6, 8));
    down = register_module("down", torch::nn::Linear(8, 6));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return body(*this, x); }
};

// more: further entries of the plan, with a comma; keys: further keys of zero_optimization, with a comma.
Options options_with(const std::string& more = "", const std::string& keys = "", int stage = 2,
                     const std::string& of_tensor_parallel = "") {
  return Options::from_json(R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": )" +
                            std::to_string(stage) + keys + R"(}, "tensor_parallel": {"autotp_size": 2,
    "partition_config": {"use_default_specs": false, "layer_specs": [
      {"patterns": ["up"], "partition_type": "column"}, {"patterns": ["down"], "partition_type": "row"})" +
                            more + "]}" + of_tensor_parallel + "}}");
}
Options options_of_pair() { return options_with(); }

Engine engine_of(const std::shared_ptr<PairImpl>& module, const Comm& comm, const Options& options) {
  return Engine(std::static_pointer_cast<torch::nn::Module>(module), options, comm);
}

// Values of all ranks of a tensor-parallel group, one row each.
at::Tensor over_tp(const Engine& engine, const at::Tensor& mine) {
  const auto& group = engine.mesh().group("tp");
  auto all = at::empty({group->size(), mine.numel()});
  group->all_gather(all.view({-1}), mine.detach().to(at::kFloat).contiguous().view({-1}))->wait();
  return all;
}
void require_same_over_tp(const Engine& engine, const at::Tensor& mine, const std::string& what) {
  const auto all = over_tp(engine, mine);
  require(all[0].equal(all[1]), what + " differs over tp");
}
at::Tensor generator_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

std::string config_error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "no ConfigError";
}

// --- random numbers -----------------------------------------------------------------------------

// Logits that stay divided, and regions of the tokens: nothing tells that an evaluation has ended.
TEST(TensorParallelSoundness, AnEvaluationLeavesTheGeneratorAsItWas) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    for (const bool regions : {false, true}) {
      auto pair = std::make_shared<PairImpl>();
      const auto gpt = std::make_shared<MegatronGptImpl>(MegatronGptConfig{});
      torch::nn::Linear head(6, 10);
      pair->register_module("lm_head", head);
      at::Tensor mask;
      const auto forward = [&](const Engine& engine) {
        if (regions) {
          gpt->set_group(engine.mesh().group("tp"));
          return gpt->forward(at::zeros({2, 8}, at::kLong)).pow(2).mean();
        }
        const auto x = draw({40, 6}, 1);
        mask = at::bernoulli(at::full_like(x, 0.5));
        const auto inside = pair->up(x * mask);
        const auto logits = head(pair->down(inside * at::bernoulli(at::full_like(inside, 0.5))));
        return tp::reduce(logits.pow(2).sum(), engine.mesh().group("tp"));
      };
      const auto module = regions ? std::static_pointer_cast<torch::nn::Module>(gpt)
                                  : std::static_pointer_cast<torch::nn::Module>(pair);
      Engine engine(module,
                    regions
                        ? Options::build().adamw().train_micro_batch_size(1).tensor_parallel(2, {})
                        : options_with(R"(, {"patterns": ["lm_head"]})", "", 2, R"(, "vocab_parallel_lm_head": true)"),
                    comm);
      const auto train = [&] {
        const auto loss = forward(engine);
        if (mask.defined()) require_same_over_tp(engine, mask, "the mask before the products");
        engine.backward(loss);
        engine.step();
      };
      train();
      for (int i = 0; i < 2; ++i) {
        {
          const at::NoGradGuard no_grad;
          forward(engine);
        }
        require_same_over_tp(engine, generator_state(), "the generator after an evaluation");
        torch::manual_seed(7);  // of the program, for its data
        require_same_over_tp(engine, at::randperm(50), "an order of samples after an evaluation");
        train();
      }
      require_same_over_tp(engine, generator_state(), "the generator after training");
    }
  });
}

// --- gradients ----------------------------------------------------------------------------------

// A norm per head between the products: its weight and its bias are whole on every rank, which sees its own heads.
struct HeadNormImpl : torch::nn::Module {
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  HeadNormImpl() {
    up = register_module("up", torch::nn::Linear(6, 12));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    down = register_module("down", torch::nn::Linear(12, 6));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = up(x);
    return down(norm(y.view({x.size(0), -1, 4})).view({x.size(0), -1}));
  }
};

TEST(TensorParallelSoundness, NormsOfHeadsAreSummedWithTheirBias) {
  const TempFolder folder;
  expect_passed({"shm", 4}, [&](const auto& comm) {
    for (int stage = 0; stage <= 3; ++stage) {
      const auto module = std::make_shared<HeadNormImpl>(), plain = std::make_shared<HeadNormImpl>();
      Engine engine(std::static_pointer_cast<torch::nn::Module>(module),
                    Options::from_json(R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": )" +
                                       std::to_string(stage) + R"(}, "tensor_parallel": {"autotp_size": 2,
        "partition_config": {"use_default_specs": false, "layer_specs": [
          {"patterns": ["up"], "multiple": 4}, {"patterns": ["down"], "partition_type": "row", "multiple": 4},
          {"patterns": ["norm"], "partition_type": "skip", "grad_allreduce": true}]}}})"),
                    comm);
      for (int micro = 0; micro < 2; ++micro) {
        const auto loss_of = [&](auto& m, int d) {
          return m.forward(draw({5, 6}, static_cast<std::uint64_t>(10 * micro + d))).pow(2).mean();
        };
        engine.backward(loss_of(*module, engine.mesh().rank("dp")));
        for (int d = 0; d < 2; ++d) (loss_of(*plain, d) / 4).backward();
        if (micro == 1) break;
        engine.step();
      }
      for (const auto& item : plain->named_parameters()) {
        const auto& wanted = item.value().grad();
        require((engine.gradient(item.key()) - wanted).norm().template item<double>() <=
                    1e-5 * wanted.norm().template item<double>(),
                "gradient of " + item.key() + " at stage " + std::to_string(stage));
      }
      engine.step();
      engine.save_checkpoint(folder.path(), "stage" + std::to_string(stage));  // equal over tp
    }
  });
}

// --- frozen parameters --------------------------------------------------------------------------

// A frozen parameter that is cut is read and replaced as a whole, on every tier.
TEST(TensorParallelSoundness, FrozenParametersAreReadAndReplacedWhole) {
  const TempFolder folder;
  const auto file =
      R"(, "offload_param": {"device": "nvme", "max_in_cpu": 0, "nvme_path": ")" + folder.path().string() + "\"}";
  for (const auto& [stage, zero] :
       std::vector<std::pair<int, std::string>>{{0, ""}, {1, ""}, {2, ""}, {3, ""}, {3, file}})
    expect_passed({"shm", 4}, [&, stage = stage, zero = zero](const auto& comm) {
      const auto module = std::make_shared<PairImpl>(), plain = std::make_shared<PairImpl>();
      for (auto* weight : {&module->up->weight, &module->down->weight}) weight->requires_grad_(false);
      auto engine = engine_of(module, comm, options_with("", zero, stage));
      const auto x = draw({4, 6}, 1);
      for (const std::string name : {"up.weight", "down.weight"}) {
        auto reference = plain->named_parameters()[name];
        require(engine.parameter_state(name).equal(reference.detach()), name + " is another");
        const auto values = draw(reference.sizes().vec(), 40 + name.size());
        engine.set_parameter_state(name, "master", comm->rank() == 0 ? values : at::zeros_like(values));
        reference.set_data(values);
        require(engine.parameter_state(name).equal(values), name + " was not replaced");
        const auto own = engine.own_parameter_state(name);
        auto sum = at::zeros({2});
        sum[0] = own.values.sum();
        sum[1] = static_cast<double>(own.values.numel());
        comm->all_reduce(sum)->wait();
        require(std::abs((sum[0] - values.sum()).template item<double>()) < 1e-4, "shards are not the whole");
        require(sum[1].template item<double>() == static_cast<double>(values.numel()), "shards leave elements out");
      }
      require((module->forward(x) - plain->forward(x)).abs().max().template item<double>() < 1e-5, "another result");
      engine.backward(module->forward(x).pow(2).mean());
      engine.step();
      require(engine.parameter_state("up.weight").equal(plain->up->weight.detach()), "a frozen weight was trained");
      // Each rank its shard.
      const auto own = engine.own_parameter_state("up.weight");
      engine.set_own_parameter_state("up.weight", "master", own.values * 2);
      require(engine.parameter_state("up.weight").equal(plain->up->weight.detach() * 2), "shards were not replaced");
      const auto text = config_error_of([&] { engine.parameter_state("up.weight", "exp_avg"); });
      require(contains(text, "up.weight has only its values, \"master\": it is frozen"), text);
    });
}

// --- checkpoints --------------------------------------------------------------------------------

// Parts of different sizes (1111 and 2222 rows) move the borders of shards within parameters that all ranks have in
// common.
TEST(TensorParallelSoundness, SavesCompareWhatIsCommonHoweverShardsDiffer) {
  const TempFolder folder;
  expect_passed({"shm", 4}, [&](const auto& comm) {
    for (int stage = 0; stage <= 3; ++stage) {
      const auto module = std::make_shared<PairImpl>();
      module->register_module("table", torch::nn::Embedding(3333, 6));
      const auto still = module->register_module("still", torch::nn::Linear(6, 6));
      still->weight.set_requires_grad(false);
      torch::nn::Linear head(6, 3333);
      module->register_module("head", head);
      module->body = [head](PairImpl& m, const at::Tensor& x) mutable { return head(m.down(m.up(x))); };
      auto engine =
          engine_of(module, comm,
                    options_with(R"(, {"patterns": ["head"], "gather_output": true, "multiple": 1111})", "", stage));
      const auto step = [&] {
        engine.backward(
            module->forward(draw({4, 6}, static_cast<std::uint64_t>(engine.mesh().rank("dp")))).pow(2).mean());
        engine.step();
      };
      step();
      engine.save_checkpoint(folder.path(), "a" + std::to_string(stage));
      // A value of tp 1 that tp 0 does not have: in a weight, a state of the optimizer, a frozen weight.
      for (const auto& [name, state, shown] : {std::tuple{"table.weight", "master", "master"},
                                               {"down.bias", "exp_avg", "exp_avg"},
                                               {"still.weight", "master", "frozen"}}) {
        const auto before = engine.own_parameter_state(name, state);
        auto values = before.values.clone();
        if (engine.mesh().rank("tp") == 1 && values.numel() > 0) values[-1] += 1e-3;
        engine.set_own_parameter_state(name, state, values);
        std::string text;
        try {
          engine.save_checkpoint(folder.path(), "b" + std::to_string(stage));
        } catch (const InternalError& e) {
          require(e.code() == ExitCode::kNumerical, "another exit code");
          text = e.what();
        }
        require(contains(text, std::string("differs: ") + name + " (" + shown +
                                   "): tp ranks 0 (ranks 0, 2), 1 (ranks 1, 3) have different values. Hint"),
                "got: " + text);
        engine.set_own_parameter_state(name, state, before.values);
      }
      engine.save_checkpoint(folder.path(), "c" + std::to_string(stage));
    }
  });
}

// Masks outside of regions, which a tensor-parallel group has in common and data-parallel ranks have not, and masks
// inside continue as in a run that was not interrupted, also where a forward that nobody uses has left a region open.
TEST(TensorParallelSoundness, RandomNumbersContinueAfterALoad) {
  for (const auto& [from, to] : {std::pair{3, 0}, {2, 2}}) {
    const TempFolder folder;
    expect_passed({"shm", 4}, [&, from = from, to = to](const auto& comm) {
      std::vector<at::Tensor> masks;  // of the steps after the save
      std::string later;
      for (const bool loads : {false, true}) {
        const auto module = std::make_shared<PairImpl>();
        at::Tensor outside, inside;
        module->body = [&](PairImpl& m, const at::Tensor& x) {
          outside = at::bernoulli(at::full_like(x, 0.5));
          const auto y = torch::tanh(m.up(x * outside));
          inside = at::bernoulli(at::full_like(y, 0.5));
          return m.down(y * inside);
        };
        auto engine = engine_of(module, comm, options_with("", "", loads ? to : from));
        torch::manual_seed(loads ? 99 : static_cast<std::uint64_t>(5 + engine.mesh().rank("dp")));
        const auto run = [&](int first) {
          for (int step = first; step < first + 2; ++step) {
            const auto seed = static_cast<std::uint64_t>(10 * step + engine.mesh().rank("dp"));
            engine.backward(module->forward(draw({20, 6}, seed)).pow(2).mean());
            engine.step();
            require_same_over_tp(engine, outside, "a mask outside of regions");
            const auto both = over_tp(engine, inside);
            require(!both[0].equal(both[1]), "the same mask inside of regions");
            for (const auto& mask : {outside, inside}) {
              if (first == 0) continue;
              if (!loads) masks.push_back(mask);
              const auto at = static_cast<std::size_t>(2 * (step - first)) + (mask.is_same(inside) ? 1 : 0);
              require(mask.equal(masks.at(at)), "another mask in step " + std::to_string(step));
            }
          }
          return engine.state_hash();
        };
        if (loads) {
          module->up(draw({4, 6}, 1));
          engine.load_checkpoint(folder.path());
        } else {
          run(0);
          engine.save_checkpoint(folder.path(), "a");
        }
        const auto hash = run(2);
        if (!loads) later = hash;
        require(hash == later, "another state after loading");
        require_same_over_tp(engine, generator_state(), "the generator");
      }
    });
  }
}

// --- recomputation ------------------------------------------------------------------------------

// Without gradients inside of a segment, products are summed in the second run as in the first.
TEST(TensorParallelSoundness, SegmentsWithBlocksWithoutGradients) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    std::string known;
    for (const bool checkpointed : {false, true}) {
      const auto module = std::make_shared<PairImpl>();
      const auto part = [](PairImpl& m, const at::Tensor& x) {
        at::Tensor scale;
        {
          const at::NoGradGuard no_grad;
          scale = m.down(m.up(x));
        }
        return torch::tanh(m.down(torch::tanh(m.up(x)))) * scale;
      };
      module->body = [&](PairImpl& m, const at::Tensor& x) {
        return checkpointed ? activation_checkpoint([&m, part](const at::Tensor& y) { return part(m, y); }, x)
                            : part(m, x);
      };
      auto engine = engine_of(module, comm, options_of_pair());
      for (int step = 0; step < 3; ++step) {
        engine.backward(module->forward(draw({4, 6}, static_cast<std::uint64_t>(step)).requires_grad_()).pow(2).mean());
        engine.step();
      }
      const auto hash = engine.state_hash();
      if (known.empty()) known = hash;
      require(hash == known, "another state with a segment");
    }
  });
}

// A reversible block: y = x + f(x0) on the other half. Its backward runs f without grad mode to get the input back, and
// then f again for the gradients.
struct Reversible : torch::autograd::Function<Reversible> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, std::int64_t module) {
    const auto halves = x.chunk(2, -1);
    const auto y = at::cat({halves[0], halves[1] + of(module)(halves[0])}, -1);
    context->save_for_backward({y});
    context->saved_data["module"] = module;
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto f = of(context->saved_data["module"].toInt());
    const auto halves = context->get_saved_variables()[0].chunk(2, -1);
    const auto gradient = gradients[0].chunk(2, -1);
    const auto second = halves[1] - f(halves[0]);
    const at::AutoGradMode grad_mode(true);
    const auto first = halves[0].detach().requires_grad_();
    const auto again = (f(first) * (1 + second.detach())).sum() * 0.5;  // an input that is off spoils the gradients
    again.backward();
    return {at::cat({gradient[0] + first.grad(), gradient[1]}, -1), at::Tensor()};
  }
  static std::function<at::Tensor(const at::Tensor&)> of(std::int64_t module) {
    return [module](const at::Tensor& x) {
      auto& m = *reinterpret_cast<PairImpl*>(module);
      return m.down(torch::tanh(m.up(x)));
    };
  }
};

// Modules that run in the backward of a Function, where autograd has turned grad mode off.
TEST(TensorParallelSoundness, ModulesInTheBackwardOfAFunction) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    const auto loss_of = [](PairImpl& m) {
      const auto x = draw({4, 12}, 1).requires_grad_();
      return Reversible::apply(x, reinterpret_cast<std::int64_t>(&m)).pow(2).mean();
    };
    const auto plain = std::make_shared<PairImpl>(), module = std::make_shared<PairImpl>();
    loss_of(*plain).backward();
    auto engine = engine_of(module, comm, options_of_pair());
    engine.backward(loss_of(*module));
    for (const auto& item : plain->named_parameters())
      require(at::allclose(engine.gradient(item.key()), item.value().grad(), 1e-5, 1e-6),
              "the gradient of " + item.key());
  });
}

// An operator that a module could not run with a part is no formula of a Function either, unless it multiplies.
struct Reads : torch::autograd::Function<Reads> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({weight});
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * context->get_saved_variables()[0].pow(2).sum(), at::Tensor()};
  }
};

TEST(TensorParallelSoundness, OtherOperatorsInTheBackwardOfAFunctionAreRefused) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    const auto module = std::make_shared<PairImpl>();
    module->body = [](PairImpl& m, const at::Tensor& x) {
      return Reads::apply(m.down(torch::tanh(m.up(x))), m.up->weight.detach());
    };
    auto engine = engine_of(module, comm, options_of_pair());
    const auto text = config_error_of([&] { engine.backward(module->forward(draw({4, 6}, 1)).pow(2).mean()); });
    require(text.find("aten::pow reads up.weight") != std::string::npos, text);
  });
}

// The last Engine that ran a forward is not the one whose segments run again.
TEST(TensorParallelSoundness, SegmentsOfTwoEngines) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    std::string known;
    for (const bool checkpointed : {false, true}) {
      const auto student = std::make_shared<PairImpl>(), teacher = std::make_shared<PairImpl>();
      const auto part = [](PairImpl& m, const at::Tensor& x) {
        const auto inside = m.up(x);
        return m.down(inside * at::bernoulli(at::full_like(inside, 0.7)));
      };
      student->body = [&](PairImpl& m, const at::Tensor& x) {
        return checkpointed ? activation_checkpoint([&m, part](const at::Tensor& y) { return part(m, y); }, x)
                            : part(m, x);
      };
      torch::manual_seed(3);
      auto of_student = engine_of(student, comm, options_of_pair());
      auto of_teacher =
          std::make_unique<Engine>(std::static_pointer_cast<torch::nn::Module>(teacher), options_of_pair(), comm);
      for (int step = 0; step < 4; ++step) {
        const auto x = draw({4, 6}, static_cast<std::uint64_t>(step));
        const auto y = student->forward(x.clone().requires_grad_());
        at::Tensor wanted;
        if (of_teacher) {
          const at::NoGradGuard no_grad;
          wanted = teacher->forward(x);
        }
        if (step == 2) of_teacher.reset();
        of_student.backward((wanted.defined() ? y - wanted : y).pow(2).mean());
        of_student.step();
        require_same_over_tp(of_student, generator_state(), "the generator");
      }
      const auto hash = of_student.state_hash();
      if (known.empty()) known = hash;
      require(hash == known, "another state with a segment");
    }
  });
}

TEST(TensorParallelSoundness, AnOperatorThatReadsPartsOfTwoEngines) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    const auto one = std::make_shared<PairImpl>(), other = std::make_shared<PairImpl>();
    auto of_one = engine_of(one, comm, options_of_pair()), of_other = engine_of(other, comm, options_of_pair());
    const auto text = config_error_of([&] { at::add(one->up->weight, other->up->weight); });
    require(contains(text, "two Engines"), text);
  });
}

// --- evaluation ---------------------------------------------------------------------------------

TEST(TensorParallelSoundness, InferenceMode) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    const auto module = std::make_shared<PairImpl>();
    auto engine = engine_of(module, comm, options_with("", "", 3));
    at::Tensor wanted, got;
    {
      const at::NoGradGuard no_grad;
      wanted = module->forward(draw({4, 6}, 1));
    }
    {
      const c10::InferenceMode inference;
      got = module->forward(draw({4, 6}, 1));
    }
    require(got.equal(wanted), "another result in inference mode");
  });
}

// --- checks -------------------------------------------------------------------------------------

TEST(TensorParallelSoundness, SanityChecksCompareEveryForward) {
  for (const bool checks : {false, true})
    expect_passed({"shm", 2}, [checks](const auto& comm) {
      const auto module = std::make_shared<PairImpl>();
      auto engine = engine_of(module, comm, options_with("", checks ? R"(, "enable_sanity_checks": true)" : ""));
      std::string text;
      for (int step = 0; step < 2; ++step) {
        const auto seed = static_cast<std::uint64_t>(step == 0 ? 0 : comm->rank());
        text = config_error_of([&] {
          engine.backward(module->forward(draw({4, 6}, seed)).pow(2).mean());
          engine.step();
        });
        if (step == 0) require(text == "no ConfigError", text);
      }
      require(contains(text, checks ? "got different input for up.weight" : "no ConfigError"), text);
    });
}

TEST(TensorParallelSoundness, IntegersAreRefused) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    for (const std::string key : {"zero_quantized_weights", "zero_quantized_gradients"}) {
      const auto text = config_error_of(
          [&] { engine_of(std::make_shared<PairImpl>(), comm, options_with("", ", \"" + key + "\": true", 3)); });
      require(contains(text, "zero_optimization." + key + ": got true with tensor parallelism"), text);
    }
  });
}

TEST(TensorParallelSoundness, AReplacedWeightAndTokensThatCannotBe) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    const auto module = std::make_shared<PairImpl>();
    auto engine = engine_of(module, comm, options_of_pair());
    const auto tokens = config_error_of([&] { engine.mesh().tokens(-1); });
    require(contains(tokens, "got -1 tokens, expected 0 or more"), tokens);
    module->up->weight.set_data(at::zeros({4, 6}));
    const auto replaced = config_error_of([&] { engine.backward(module->forward(draw({4, 6}, 1)).pow(2).mean()); });
    require(contains(replaced, "up.weight"), replaced);
  });
}

// --- the loss -----------------------------------------------------------------------------------

// A masked vocabulary whose last rows are all of one rank's.
TEST(TensorParallelSoundness, LossOfAPartThatIsMasked) {
  expect_passed({"shm", 2}, [](const auto& comm) {
    auto whole = draw({5, 8}, 1);
    whole.narrow(1, 4, 4).fill_(-std::numeric_limits<float>::infinity());
    const auto targets = at::tensor({0, 1, 2, 3, 0}, at::kLong);
    auto own = whole.narrow(1, 4 * comm->rank(), 4).clone().requires_grad_();
    const auto loss = tp::cross_entropy(own, targets, comm);
    loss.backward();
    auto reference = whole.clone().requires_grad_();
    const auto wanted = torch::nn::functional::cross_entropy(reference, targets);
    wanted.backward();
    require(std::abs(loss.template item<double>() - wanted.template item<double>()) < 1e-6, "loss");
    require((own.grad() - reference.grad().narrow(1, 4 * comm->rank(), 4)).abs().max().template item<double>() < 1e-6,
            "gradient");
    const auto text = config_error_of([&] {
      tp::cross_entropy(at::zeros({1, 1}), targets.narrow(0, 0, 1), comm, {.vocabulary = 1});
    });
    require(contains(text, "got a vocabulary of 1, expected at least 2"), text);
  });
}

}  // namespace
}  // namespace zero::test::tensor_parallel_soundness_test
