// Failed passes, frozen parameters, two Engines: later values equal those of a loop without libzero that did the same.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <filesystem>

#include "soundness/cases.h"
#include "support/folder.h"

namespace zero::test::failures_test {
namespace {

class Failures : public Everywhere {};
INSTANTIATE_TEST_SUITE_P(Everywhere, Failures, ::testing::ValuesIn(all_cases()), name_of_case);

struct Fuse : torch::autograd::Function<Fuse> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, bool blows) {
    context->saved_data["blows"] = blows;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    if (context->saved_data["blows"].toBool()) throw std::runtime_error("the fuse blew");
    return {gradients[0], at::Tensor()};
  }
};

// The backward fails when the second half of the model has its gradients.
at::Tensor fused_loss(Net& net, int rank, int micro_batch, bool blows) {
  auto x = net.layers[0]->as<torch::nn::Linear>()->forward(input_of(rank, micro_batch));
  x = at::gelu(net.layers[1]->as<torch::nn::LayerNorm>()->forward(x));
  x = Fuse::apply(x, blows);
  x = net.layers[2]->as<torch::nn::Linear>()->forward(x);
  x = at::gelu(net.layers[3]->as<torch::nn::LayerNorm>()->forward(x));
  return (net.head(x) - 0.5).pow(2).mean();
}

std::string message_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "nothing";
}

// The same backward fails on every rank, and later the same forward.
TEST_P(Failures, AFailedPassNeverWas) {
  for (const int accumulation : {1, 2}) {
    for (const char* extra : {"", R"(, "bf16": {"enabled": true})"}) {
      expect([=, this](const auto& comm) {
        // The run that never failed.
        const bool bf16 = *extra != 0;
        const auto train = [&](bool fails) {
          auto net = make_net();
          Engine engine(net, Options::from_json(json_for(stage(), "SGD", accumulation, extra)), comm);
          const auto loss = [&](int batch, bool blows) {
            if (!bf16) return fused_loss(*net, comm->rank(), batch, blows);
            auto x = Fuse::apply(net->layers[0]->template as<torch::nn::Linear>()->forward(
                                     input_of(comm->rank(), batch).to(at::kBFloat16)),
                                 blows);
            return net->head(at::gelu(net->layers[2]->template as<torch::nn::Linear>()->forward(x)))
                .to(at::kFloat)
                .pow(2)
                .mean();
          };
          for (int batch = 0; batch < 4 * accumulation; ++batch) {
            if (fails && batch == 1 * accumulation) {  // the first micro-batch of a step
              const auto text = message_of([&] { engine.backward(loss(90, true)); });
              require(contains(text, "the fuse blew"), text);
              if (comm->size() > 1) require(engine.discard_micro_batch() == 0, "micro-batches left");
              require(engine.micro_batches() == 0, "micro-batches after a failure");
            }
            if (fails && batch == 3 * accumulation - 1) {  // a forward, the last micro-batch of a step
              const auto text = message_of([&] {
                (void)loss(91, false);
                throw std::runtime_error("the forward failed");
              });
              require(contains(text, "the forward failed"), text);
              require(engine.discard_micro_batch() == accumulation - 1,
                      "a forward that failed took micro-batches away");
            }
            engine.backward(loss(batch, false));
            engine.step();
          }
          return engine.state_hash();
        };
        require(train(true) == train(false), "a failed pass left something behind");
      });
    }
  }
}

// In a step of several micro-batches, the failed one also drops those accumulated before; the error reports it.
TEST_P(Failures, AFailureAmongMicroBatches) {
  expect([this](const auto& comm) {
    auto net = make_net();
    Engine engine(net, Options::from_json(json_for(stage(), "SGD", 2)), comm);
    Plain plain(world(), "SGD");
    engine.backward(fused_loss(*net, comm->rank(), 0, false));
    engine.step();
    (void)message_of([&] { engine.backward(fused_loss(*net, comm->rank(), 1, true)); });
    if (world() > 1) engine.discard_micro_batch();
    require(engine.micro_batches() == 0, "micro-batches kept: " + std::to_string(engine.micro_batches()));
    for (int batch = 2; batch < 4; ++batch) {
      engine.backward(fused_loss(*net, comm->rank(), batch, false));
      engine.step();
      plain.backward([&](Net& model, int rank) { return fused_loss(model, rank, batch, false); }, 0.5);
    }
    plain.step();
    require_equal(engine, plain.net(), "after the failure");
  });
}

// With a copy they are kept, bitwise.
TEST_P(Failures, ARecoverableFailureAmongMicroBatches) {
  for (const char* extra : {"", R"(, "bf16": {"enabled": true})", R"(, "gradient_predivide_factor": 4.0)"}) {
    expect([=, this](const auto& comm) {
      const auto train = [&](bool fails) {
        auto net = make_net();
        Engine engine(net, Options::from_json(json_for(stage(), "SGD", 3, extra)), comm);
        const auto dtype = *extra != 0 && contains(extra, "bf16") ? at::kBFloat16 : at::kFloat;
        const auto loss = [&](int batch, bool blows) {
          auto x = net->layers[0]->template as<torch::nn::Linear>()->forward(input_of(comm->rank(), batch).to(dtype));
          x = net->layers[2]->template as<torch::nn::Linear>()->forward(Fuse::apply(x, blows));
          return net->head(at::gelu(x)).to(at::kFloat).pow(2).mean();
        };
        for (int batch = 0; batch < 6; ++batch) {
          if (fails && batch % 3 != 0) {
            const auto text = message_of([&] { engine.backward(loss(90 + batch, true), {.recoverable = true}); });
            require(contains(text, "the fuse blew"), text);
            if (world() > 1) require(engine.discard_micro_batch() == batch % 3, "micro-batches were lost");
            require(engine.micro_batches() == batch % 3, "micro-batches are gone");
          }
          engine.backward(loss(batch, false), {.recoverable = batch % 2 == 0});
          engine.step();
        }
        return engine.state_hash();
      };
      require(train(true) == train(false), "a failed micro-batch left something behind");
    });
  }
}

// The copy for `recoverable` does not fit into the budget: an error, and the pass has no effect.
TEST_P(Failures, ACopyOfSumsBeyondTheBudget) {
  // Other cases run the same code. Peaks over shared memory depend on timing, and the smallest budget of stages 2 and 3
  // includes buffers of collectives that a single rank does not need, so a copy would always fit.
  if (world() > 1 || stage() > 1) return;
  for (const char* extra : {"", R"(, "gradient_predivide_factor": 4.0)"})
    expect([=, this](const auto& comm) {
      const auto device_bytes = [](const Engine& engine) {
        return static_cast<std::int64_t>(engine.memory().current(MemoryReport::Tier::Device));
      };
      std::int64_t plain_peak = 0, sums = 0;
      const auto train = [&](std::int64_t budget) {
        auto net = make_net();
        const auto memory =
            extra + (budget == 0 ? std::string() : R"(, "memory": {"device": )" + std::to_string(budget) + "}");
        Engine engine(net, Options::from_json(json_for(stage(), "SGD", 3, memory)), comm);
        int refused = 0;
        for (int batch = 0; batch < 6; ++batch) {
          const auto before = device_bytes(engine);
          if (budget != 0 && batch % 3 != 0) {
            const auto text =
                message_of([&] { engine.backward(loss_of(*net, comm->rank(), batch), {.recoverable = true}); });
            if (text == "nothing") {
              engine.step();
              continue;
            }
            require(contains(text, "memory.device"), text);
            require(engine.micro_batches() == batch % 3, "a micro-batch was lost");
            require(device_bytes(engine) == before, "a part of the copy is still there");
            ++refused;
          }
          engine.backward(loss_of(*net, comm->rank(), batch));
          engine.step();
          if (batch == 0) sums = device_bytes(engine) - before;
        }
        plain_peak = static_cast<std::int64_t>(engine.memory().peak(MemoryReport::Tier::Device));
        return std::pair(refused, engine.state_hash());
      };
      const auto expected = train(0);
      const auto smallest = plain_peak, step = std::max<std::int64_t>(sums, 4096) / 8;
      int refused = 0;
      for (int i = 0; i < 8; ++i) {
        const auto [times, hash] = train(smallest + i * step);
        refused += times;
        require(hash == expected.second, "other masters than without the budget");
      }
      require(refused > 0, "no budget was too small for a copy");
    });
}

// A pass fails, or is discarded, while the previous step's update is running in the background.
TEST_P(Failures, DuringALateUpdate) {
  if (stage() == 0) return;
  const TempFolder temporary;
  const auto folder = temporary.text();
  for (const auto& device : {std::string(R"("cpu")"), R"("nvme", "nvme_path": ")" + folder + "\""}) {
    const auto zero =
        R"(, "offload_optimizer": {"device": )" + device + R"(}, "delayed_update": {"enabled": true, "start_step": 1})";
    expect([&, this](const auto& comm) {
      const auto train = [&](bool fails) {
        auto net = make_net();
        Engine engine(net, Options::from_json(json_for(stage(), "AdamW", 1, "", zero)), comm);
        for (int batch = 0; batch < 36; ++batch) {  // what disturbs the update shows by chance
          for (int again = 0; fails && again < 3; ++again) {
            const auto text = message_of([&] { engine.backward(fused_loss(*net, comm->rank(), 90 + batch, true)); });
            require(contains(text, "the fuse blew"), text);
            if (world() > 1 || again == 1) engine.discard_micro_batch();
          }
          engine.backward(fused_loss(*net, comm->rank(), batch, false));
          engine.step();
        }
        engine.flush();
        return engine.state_hash();
      };
      require(train(true) == train(false), "a failed pass touched an update under way");
    });
  }
}

// Only one rank fails: the others get its error.
TEST_P(Failures, OneRankAloneNamesItself) {
  if (world() == 1) return;
  const auto errors = run_at(GetParam().place, [this](const auto& comm) {
    auto net = make_net();
    Engine engine(net, Options::from_json(json_for(stage(), "SGD")), comm);
    for (int step = 0; step < 3; ++step) {
      engine.backward(fused_loss(*net, comm->rank(), step, step == 1 && comm->rank() == 1));
      engine.step();
    }
  });
  EXPECT_TRUE(contains(errors, "the fuse blew")) << errors;
  // Threads rethrow the first error as it was.
  if (GetParam().place.transport != std::string("thread")) {
    EXPECT_TRUE(contains(errors, "rank 1")) << errors;
  }
}

// A rank continues without the call that the others wait for.
TEST_P(Failures, GoingOnWithoutDiscarding) {
  if (world() == 1) return;
  expect([this](const auto& comm) {
    auto net = make_net();
    // The first rank to fail reports the remedy; the others report that rank's error from their current call.
    const auto text = message_of([&] {
      Engine engine(net, Options::from_json(json_for(stage(), "SGD")), comm);
      (void)message_of([&] { engine.backward(fused_loss(*net, comm->rank(), 0, true)); });
      engine.step();
    });
    require(contains(text, "the fuse blew"), text);
  });
}

// After a mistake that every rank makes, all ranks can continue.
TEST_P(Failures, MistakesLeaveTheCommunicator) {
  expect([this](const auto& comm) {
    auto net = make_net();
    Engine engine(net, Options::from_json(json_for(stage(), "SGD", 2)), comm);
    (void)error_of([&] { engine.backward(at::ones({3})); }, "not a scalar");
    engine.backward(loss_of(*net, comm->rank(), 0));
    engine.step();
    (void)error_of([&] { (void)engine.gathered_parameters(true); }, "a modifying scope between micro-batches");
    {
      const at::NoGradGuard no_grad;
      (void)error_of([&] { net->head->bias.add_(1); }, "a write in place");
    }
    engine.backward(loss_of(*net, comm->rank(), 1));
    engine.step();
    const auto folder = std::filesystem::temp_directory_path() / ("zero-mistakes-" + std::to_string(getppid()));
    engine.save_checkpoint(folder, "t");
    comm->barrier();
    if (comm->rank() == 0) std::filesystem::remove_all(folder);
    (void)engine.state_hash();
  });
}

// The same for a refused Engine: all ranks get the same error and continue with the same communicator.
TEST_P(Failures, RefusedEnginesLeaveTheCommunicator) {
  expect([this](const auto& comm) {
    auto net = make_net();
    const auto refusal_of = [&](int stage, const std::string& extra) -> std::string {
      try {
        Engine(net, Options::from_json(json_for(stage, "AdamW", 1, extra)), comm);
      } catch (const ConfigError& error) {
        return error.what();
      }
      return "no ConfigError";
    };
    const auto budget = refusal_of(stage(), R"(, "memory": {"device": 100})");
    require(contains(budget, "the smallest budget that works"), budget);
    const auto pattern = refusal_of(stage(), R"(, "libzero": {"parameter_groups": [{"pattern": "*.bais"}]})");
    require(contains(pattern, "*.bais"), pattern);
    if (world() > 1) {  // rank 1 alone has another configuration
      const auto other = refusal_of(comm->rank() == 1 ? (stage() + 1) % 4 : stage(), "");
      require(contains(other, "rank 1") && contains(other, "zero_optimization.stage"), other);
    }
    Engine engine(net, Options::from_json(json_for(stage(), "AdamW")), comm);
    engine.backward(loss_of(*net, comm->rank(), 0));
    engine.step();
    const auto folder = std::filesystem::temp_directory_path() / ("zero-refused-" + std::to_string(getppid()));
    engine.save_checkpoint(folder, "t");
    comm->barrier();
    if (comm->rank() == 0) std::filesystem::remove_all(folder);
    (void)engine.state_hash();
  });
}

// Frozen parameters: no update, no decay, no step counted, as in libtorch's optimizers.
TEST_P(Failures, FreezingAndUnfreezing) {
  for (const char* zero : {"", R"(, "offload_optimizer": {"device": "cpu"})"}) {
    if (stage() == 0 && *zero != 0) continue;
    expect([=, this](const auto& comm) {
      auto net = make_net();
      Engine engine(net, Options::from_json(json_for(stage(), "AdamW", 1, "", zero)), comm);
      Plain plain(world(), "AdamW");
      const auto freeze = [&](int step) {
        for (Net* model : std::initializer_list<Net*>{net.get(), &plain.net()}) {
          // A whole unit from the start, for a while; one member of a unit in between; the root's weight at the end.
          for (auto& p : model->layers[0]->parameters()) p.requires_grad_(step >= 2);
          model->layers[2]->as<torch::nn::Linear>()->bias.requires_grad_(step < 3 || step > 4);
          model->head->weight.requires_grad_(step < 5);
        }
      };
      for (int step = 0; step < 7; ++step) {
        freeze(step);
        engine.backward(loss_of(*net, comm->rank(), step));
        require(engine.gradient("head.weight").defined() == (step < 5), "gradient() of a frozen parameter");
        engine.step();
        plain.backward([&](Net& model, int rank) { return loss_of(model, rank, step); });
        plain.step();
        require_equal(engine, plain.net(), "step " + std::to_string(step));
      }
    });
  }
}

// The gradients that arrived count.
TEST_P(Failures, FreezingAndUnfreezingWithinAStep) {
  expect([this](const auto& comm) {
    auto net = make_net();
    Engine engine(net, Options::from_json(json_for(stage(), "AdamW", 2)), comm);
    Plain plain(world(), "AdamW");
    for (int micro = 0; micro < 6; ++micro) {
      for (Net* model : std::initializer_list<Net*>{net.get(), &plain.net()}) {
        model->head->bias.requires_grad_(micro % 2 == 0);  // frozen after the first micro-batch
        model->layers[2]->as<torch::nn::Linear>()->bias.requires_grad_(micro % 2 != 0);  // trained from the second on
      }
      engine.backward(loss_of(*net, comm->rank(), micro));
      plain.backward([&](Net& model, int rank) { return loss_of(model, rank, micro); }, 0.5);
      engine.step();
      if (micro % 2 != 0) plain.step();
    }
    require_equal(engine, plain.net(), "freezing within steps");
  });
}

TEST_P(Failures, FreezingOnOneRankIsNoticed) {
  if (world() == 1) return;
  expect([this](const auto& comm) {
    auto net = make_net();
    Engine engine(net, Options::from_json(json_for(stage(), "SGD")), comm);
    if (comm->rank() == 1) net->head->bias.requires_grad_(false);
    engine.backward(loss_of(*net, comm->rank(), 0));
    const auto text = error_of([&] { engine.step(); }, "frozen on rank 1");
    require(contains(text, "requires_grad_()") && contains(text, "rank 1"), text);
  });
}

// Frozen steps and rates are in the checkpoint.
TEST_P(Failures, CheckpointsRememberWhatTheProgramSet) {
  expect([this](const auto& comm) {
    const auto folder = std::filesystem::temp_directory_path() / ("zero-program-" + std::to_string(getppid()));
    const auto train = [&](bool resumes) {
      auto net = make_net();
      auto engine = std::make_unique<Engine>(net, Options::from_json(json_for(stage(), "AdamW")), comm);
      for (int step = 0; step < 4; ++step) {
        net->head->weight.requires_grad_(step > 1);
        if (step == 1) engine->set_lr(0, 0.01);
        if (step == 2 && resumes) {
          engine->save_checkpoint(folder, "t");
          engine.reset();
          net = make_net(8);
          engine = std::make_unique<Engine>(net, Options::from_json(json_for(stage(), "AdamW")), comm);
          engine->load_checkpoint(folder, "t");
          require(engine->lr() == 0.01, "the rate was not saved");
        }
        engine->backward(loss_of(*net, comm->rank(), step));
        engine->step();
      }
      return engine->state_hash();
    };
    const auto without = train(false);
    require(train(true) == without, "resumed otherwise");
    comm->barrier();
    if (comm->rank() == 0) std::filesystem::remove_all(folder);
  });
}

// A generator trained through a discriminator, each with an Engine: gradients of the generator's loss at the
// discriminator's parameters are not used by the discriminator, whether requires_grad is toggled or not.
TEST_P(Failures, TwoEngines) {
  for (const bool toggles : {false, true}) {
    expect([=, this](const auto& comm) {
      const auto json = json_for(stage(), "SGD");
      auto g = make_net(1), d = make_net(2);
      Engine first(g, Options::from_json(json), comm), second(d, Options::from_json(json), comm);
      // Without libzero: the same nets with separate gradients.
      auto plain_g = make_net(1), plain_d = make_net(2);
      const auto through = [](Net& made, Net& judge, int rank, int step) {
        const auto fake = made.forward(input_of(rank, step)).repeat({1, 8});
        return judge.forward(fake).pow(2).mean();
      };
      const auto judged = [](Net& made, Net& judge, int rank, int step) {
        const auto fake = made.forward(input_of(rank, step)).repeat({1, 8}).detach();
        return (judge.forward(fake) - 1).pow(2).mean() + judge.forward(input_of(rank, step + 50)).pow(2).mean();
      };
      const auto descend = [&](Net& net, const std::function<at::Tensor(int)>& loss) {
        std::vector<at::Tensor> sums;
        for (int rank = 0; rank < world(); ++rank) {
          const auto gradients = torch::autograd::grad({loss(rank)}, net.parameters());
          for (std::size_t i = 0; i < gradients.size(); ++i)
            if (rank == 0)
              sums.push_back(gradients[i].clone());
            else
              sums[i] += gradients[i];
        }
        const at::NoGradGuard no_grad;
        const auto parameters = net.parameters();
        for (std::size_t i = 0; i < sums.size(); ++i) parameters[i].data().sub_(sums[i] * (0.05 / world()));
      };
      for (int step = 0; step < 3; ++step) {
        second.backward(judged(*g, *d, comm->rank(), step));
        // The generator's pass comes before the discriminator's step, once.
        if (step != 1) second.step();
        if (step != 1) descend(*plain_d, [&](int rank) { return judged(*plain_g, *plain_d, rank, step); });
        if (toggles)
          for (auto& p : d->parameters()) p.requires_grad_(false);
        first.backward(through(*g, *d, comm->rank(), step));
        if (toggles)
          for (auto& p : d->parameters()) p.requires_grad_(true);
        std::vector<at::Tensor> of_d;
        if (step == 1)
          for (int rank = 0; rank < world(); ++rank) {
            const auto gradients =
                torch::autograd::grad({judged(*plain_g, *plain_d, rank, step)}, plain_d->parameters());
            for (std::size_t i = 0; i < gradients.size(); ++i)
              if (rank == 0)
                of_d.push_back(gradients[i].clone());
              else
                of_d[i] += gradients[i];
          }
        descend(*plain_g, [&](int rank) { return through(*plain_g, *plain_d, rank, step); });
        first.step();
        if (step == 1) {
          second.step();
          const at::NoGradGuard no_grad;
          for (std::size_t i = 0; i < of_d.size(); ++i)
            plain_d->parameters()[i].data().sub_(of_d[i] * (0.05 / world()));
        }
      }
      require_equal(first, *plain_g, "the generator");
      require_equal(second, *plain_d, "the discriminator");
    });
  }
}

}  // namespace
}  // namespace zero::test::failures_test
