// Uses of losses, graphs and gradients other than one backward and one step: every stage and transport compared with a
// loop without libzero.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/utils/clip_grad.h>

#include "soundness/cases.h"

namespace zero::test::backward_test {
namespace {

class Backward : public Everywhere {};
INSTANTIATE_TEST_SUITE_P(Everywhere, Backward, ::testing::ValuesIn(all_cases()), name_of_case);

at::Tensor first_loss(const at::Tensor& y) { return y.pow(2).mean(); }
at::Tensor second_loss(const at::Tensor& y) { return (y - 1).abs().mean(); }

TEST_P(Backward, SeveralLossesOnOneGraph) {
  for (const int accumulation : {1, 2}) {
    expect([=, this](const auto& comm) {
      auto net = make_net();
      Engine engine(net, Options::from_json(json_for(stage(), "SGD", accumulation)), comm);
      Plain plain(world(), "SGD");
      for (int step = 0; step < 3; ++step) {
        for (int micro = 0; micro < accumulation; ++micro) {
          const int batch = step * accumulation + micro;
          const auto y = net->forward(input_of(comm->rank(), batch));
          engine.backward(first_loss(y), {.retain_graph = true});
          // The last backward ends the micro-batch, or step() does.
          engine.backward(second_loss(y), {.retain_graph = step == 1});
          plain.backward(
              [&](Net& model, int rank) {
                const auto z = model.forward(input_of(rank, batch));
                return first_loss(z) + second_loss(z);
              },
              1.0 / accumulation);
          require(engine.step().updated == (micro + 1 == accumulation), "an update where there is none due");
        }
        plain.step();
      }
      require_equal(engine, plain.net(), "two losses");
    });
  }
}

at::Tensor penalty_of(const std::vector<at::Tensor>& gradients) {
  auto sum = at::zeros({});
  for (const auto& g : gradients) sum = sum + g.pow(2).sum();
  return 0.1 * sum;
}

// create_graph: a loss that is computed from gradients.
TEST_P(Backward, CreateGraph) {
  expect([this](const auto& comm) {
    auto net = make_net();
    Engine engine(net, Options::from_json(json_for(stage(), "SGD")), comm);
    Plain plain(world(), "SGD");
    for (int step = 0; step < 3; ++step) {
      engine.backward(loss_of(*net, comm->rank(), step), {.create_graph = true});
      std::vector<at::Tensor> gradients;
      for (const auto& p : net->parameters()) gradients.push_back(p.grad());
      engine.backward(penalty_of(gradients));
      gradients.clear();
      engine.step();
      plain.backward([&](Net& model, int rank) {
        const auto loss = loss_of(model, rank, step);
        return loss + penalty_of(torch::autograd::grad({loss}, model.parameters(), {}, true, true));
      });
      plain.step();
    }
    require_equal(engine, plain.net(), "create_graph");
    // Without a second backward, step() uses the gradients of the first.
    engine.backward(loss_of(*net, comm->rank(), 7), {.create_graph = true});
    engine.step();
    plain.backward([&](Net& model, int rank) { return loss_of(model, rank, 7); });
    plain.step();
    require_equal(engine, plain.net(), "create_graph and no more");
  });
}

// Another backward reaches a gradient that is kept with its graph. The two are already added, so the micro-batch must
// be repeated.
TEST_P(Backward, AnotherBackwardBetweenTwoPasses) {
  expect([this](const auto& comm) {
    auto net = make_net(), other = make_net(5);
    Engine engine(net, Options::from_json(json_for(stage(), "SGD")), comm);
    Engine second(other, Options::from_json(json_for(stage(), "SGD")), comm);
    Plain plain(world(), "SGD");
    for (const bool plainly : {false, true}) {
      engine.backward(loss_of(*net, comm->rank(), 0), {.create_graph = true});
      if (plainly) {
        (void)error_of([&] { net->head->bias.sum().backward(); }, "a plain backward");
      } else {
        second.backward(loss_of(*other, comm->rank(), 1) * net->head->bias.sum());
        second.step();
      }
      const auto text = error_of([&] { engine.backward(loss_of(*net, comm->rank(), 2)); }, "the second pass");
      require(contains(text, "head.bias") && contains(text, "another backward"), text);
      require(contains(error_of([&] { engine.step(); }, "step"), "another backward"), "step() says something else");
      engine.discard_micro_batch();
      engine.backward(loss_of(*net, comm->rank(), 3));
      engine.step();
      plain.backward([&](Net& model, int rank) { return loss_of(model, rank, 3); });
      plain.step();
      require_equal(engine, plain.net(), "after the mixture");
    }
  });
}

// With ignore_unused_parameters false, a parameter that no pass of the micro-batch reaches is an error; one that any
// pass reaches is not.
TEST_P(Backward, UnusedAfterCreateGraph) {
  expect([this](const auto& comm) {
    auto net = make_net();
    const char* const zero = R"(, "ignore_unused_parameters": false)";
    Engine engine(net, Options::from_json(json_for(stage(), "SGD", 1, "", zero)), comm);
    engine.backward(loss_of(*net, comm->rank(), 0), {.create_graph = true});
    engine.backward(net->head->weight.pow(2).sum());  // reaches one parameter, and the pass before all of them
    engine.step();
    const auto body_loss = [&](int step) {
      auto x = net->layers[0]->as<torch::nn::Linear>()->forward(input_of(comm->rank(), step));
      x = net->layers[1]->as<torch::nn::LayerNorm>()->forward(x);
      x = net->layers[2]->as<torch::nn::Linear>()->forward(x);
      return net->layers[3]->as<torch::nn::LayerNorm>()->forward(x).pow(2).mean();
    };
    engine.backward(body_loss(1), {.create_graph = true});
    const auto text = error_of([&] { engine.backward(body_loss(2)); }, "head unused in both passes");
    require(contains(text, "no gradient for parameter head.") && contains(text, "1 more"), text);
    comm->barrier();  // a rank that has ended would be the error of one that still reduces
  });
}

// A penalty on the gradient of the input: double backward inside the loss, which needs no option.
TEST_P(Backward, GradientPenalty) {
  expect([this](const auto& comm) {
    auto net = make_net();
    Engine engine(net, Options::from_json(json_for(stage(), "SGD")), comm);
    Plain plain(world(), "SGD");
    const auto loss = [](Net& model, int rank, int step) {
      auto x = input_of(rank, step).requires_grad_();
      const auto y = model.forward(x);
      return y.pow(2).mean() + penalty_of(torch::autograd::grad({y.sum()}, {x}, {}, true, true));
    };
    for (int step = 0; step < 3; ++step) {
      engine.backward(loss(*net, comm->rank(), step));
      engine.step();
      plain.backward([&](Net& model, int rank) { return loss(model, rank, step); });
      plain.step();
    }
    require_equal(engine, plain.net(), "penalty");
  });
}

TEST_P(Backward, GradientsByName) {
  for (const char* extra : {"", R"(, "prescale_gradients": true)", R"(, "gradient_predivide_factor": 3.0)",
                            R"(, "zero_allow_untested_optimizer": true)"}) {
    expect([=, this](const auto& comm) {
      auto net = make_net();
      Engine engine(net, Options::from_json(json_for(stage(), "SGD", 2, extra)), comm);
      Plain plain(world(), "SGD");
      const auto before = error_of([&] { (void)engine.gradient("head.bias"); }, "before backward");
      require(contains(before, "after 0 of 2 micro-batches"), before);
      for (int micro = 0; micro < 2; ++micro) {
        engine.backward(loss_of(*net, comm->rank(), micro));
        plain.backward([&](Net& model, int rank) { return loss_of(model, rank, micro); }, 0.5);
        if (micro == 0) {
          engine.step();
          const auto between = error_of([&] { (void)engine.gradient("head.bias"); }, "between micro-batches");
          require(contains(between, "after 1 of 2 micro-batches"), between);
        }
      }
      const auto unknown = error_of([&] { (void)engine.gradient("head.bais"); }, "an unknown name");
      require(contains(unknown, "head.bais"), unknown);
      for (const auto& item : plain.net().named_parameters()) {
        const auto whole = engine.gradient(item.key());
        const auto& expected = item.value().grad();
        require(whole.sizes() == expected.sizes() && whole.scalar_type() == at::kFloat,
                item.key() + ": shape or dtype");
        const auto gap = (whole - expected).abs().max().item<double>();
        require(gap <= 1e-6 * expected.abs().max().item<double>() + 1e-9,
                item.key() + " is off by " + std::to_string(gap));
        // The parts of all ranks together are the whole gradient.
        const auto own = engine.own_gradient(item.key());
        const auto flat = whole.view({-1});
        require(own.values.numel() == 0 || flat.narrow(0, own.begin, own.values.numel()).equal(own.values),
                item.key() + ": own part");
        std::int64_t sum = 0;
        for (const auto& text : comm->all_gather_bytes(std::to_string(own.values.numel()))) sum += std::stoll(text);
        require(sum == flat.numel(), item.key() + ": own parts have " + std::to_string(sum) + " elements");
      }
      engine.step();
      plain.step();
      require_equal(engine, plain.net(), "the step after");
    });
  }
}

// Gradients do not include fp16's loss scale.
TEST(BackwardFp16, GradientsByNameAreUnscaled) {
  EXPECT_EQ(
      run_at(
          {"shm", 2},
          [](const auto& comm) {
            auto net = make_net();
            Engine engine(
                net,
                Options::from_json(json_for(2, "SGD", 1, R"(, "fp16": {"enabled": true, "initial_scale_power": 10})")),
                comm);
            Plain plain(2, "SGD");
            engine.backward((net->forward(input_of(comm->rank(), 0).to(at::kHalf)).to(at::kFloat) - 0.5).pow(2).mean());
            plain.backward([](Net& model, int rank) { return loss_of(model, rank, 0); });
            const auto ours = engine.gradient("head.weight");
            const auto expected = plain.net().head->weight.grad();
            const auto gap = (ours - expected).abs().max() / expected.abs().max();
            require(gap.template item<double>() < 0.02, "off by " + std::to_string(gap.template item<double>()));
            engine.step();
          }),
      "");
}

// Clipping, clearing or reading .grad between backward and step is the same error everywhere, and changes nothing.
TEST_P(Backward, GradientsAreNotTheProgramsMeanwhile) {
  expect([this](const auto& comm) {
    auto net = make_net();
    Engine engine(net, Options::from_json(json_for(stage(), "SGD")), comm);
    Plain plain(world(), "SGD");
    for (int step = 0; step < 3; ++step) {
      if (step == 1) net->zero_grad();  // there is no gradient yet
      if (step == 2) net->zero_grad(/*set_to_none=*/false);
      engine.backward(loss_of(*net, comm->rank(), step));
      plain.backward([&](Net& model, int rank) { return loss_of(model, rank, step); });
      const auto clipped =
          error_of([&] { torch::nn::utils::clip_grad_norm_(net->parameters(), 1e-3); }, "clip_grad_norm_");
      require(contains(clipped, "engine.gradient(name)") && contains(clipped, "layers.0.weight"), clipped);
      const auto read = error_of([&] { (void)net->head->bias.grad().norm(); }, "read");
      require(contains(read, "head.bias"), read);
      const auto written = error_of([&] { net->head->bias.mutable_grad().mul_(2); }, "written");
      require(contains(written, "head.bias"), written);
      const auto raw = error_of([&] { (void)net->head->bias.grad().template const_data_ptr<float>(); }, "raw pointer");
      require(contains(raw, "head.bias"), raw);
      engine.step();
      plain.step();
    }
    require_equal(engine, plain.net(), "after errors");
    engine.backward(loss_of(*net, comm->rank(), 3));
    net->zero_grad();
    const auto cleared = error_of([&] { engine.step(); }, "cleared");
    require(contains(cleared, "was cleared or replaced between two micro-batches, or before step()") &&
                contains(cleared, "zero_grad"),
            cleared);
  });
}

TEST_P(Backward, PlainBackwardIsRefusedAndLeavesNothing) {
  expect([this](const auto& comm) {
    auto net = make_net();
    loss_of(*net, comm->rank(), 9).backward();  // a trial before the Engine is made
    Engine engine(net, Options::from_json(json_for(stage(), "SGD")), comm);
    Plain plain(world(), "SGD");
    for (int step = 0; step < 2; ++step) {
      const auto outside = error_of([&] { loss_of(*net, comm->rank(), 5).backward(); }, "plain backward");
      require(contains(outside, "engine.backward(loss)"), outside);
      engine.backward(loss_of(*net, comm->rank(), step));
      const auto between = error_of([&] { loss_of(*net, comm->rank(), 5).backward(); }, "plain backward before step");
      require(contains(between, "engine.backward(loss)"), between);
      engine.step();
      plain.backward([&](Net& model, int rank) { return loss_of(model, rank, step); });
      plain.step();
    }
    require_equal(engine, plain.net(), "after refusals");
  });
}

// A graph built before the step uses parameters from before the step.
TEST_P(Backward, AGraphDoesNotOutliveTheStep) {
  expect([this](const auto& comm) {
    auto net = make_net();
    Engine engine(net, Options::from_json(json_for(stage(), "SGD")), comm);
    const auto old = loss_of(*net, comm->rank(), 0);
    engine.backward(loss_of(*net, comm->rank(), 1));
    engine.step();
    std::string error;
    try {
      engine.backward(old);
    } catch (const std::exception& e) {
      error = e.what();
    }
    require(contains(error, "modified by an inplace operation"), "got: " + error);
    engine.discard_micro_batch();
  });
}

TEST_P(Backward, RatesSetByTheProgram) {
  expect([this](const auto& comm) {
    const auto json = json_for(stage(), "SGD", 1, R"(, "libzero": {"parameter_groups": [{"pattern": "*.bias"}]})");
    auto net = make_net();
    Engine engine(net, Options::from_json(json), comm);
    Plain plain(world(), "SGD");
    for (int step = 0; step < 3; ++step) {
      engine.backward(loss_of(*net, comm->rank(), step));
      plain.backward([&](Net& model, int rank) { return loss_of(model, rank, step); });
      if (step == 1) {
        for (int group = 0; group < 2; ++group) engine.set_lr(group, 0.2);
        plain.set_lr(0.2);
      }
      require(engine.step().lr == (step == 0 ? 0.05 : 0.2), "StepResult::lr");
      plain.step();
    }
    require(engine.lr() == 0.2 && engine.lr(1) == 0.2, "lr()");
    for (const auto& parameter : net->named_parameters())
      require(engine.parameter_group(parameter.key()) == (parameter.key().ends_with(".bias") ? 1 : 0),
              "parameter_group()");
    try {
      engine.parameter_group("none");
      throw std::runtime_error("accepted an unknown name");
    } catch (const ConfigError& error) {
      require(std::string(error.what()).find("got the name none") != std::string::npos, "ConfigError");
    }
    require_equal(engine, plain.net(), "rates");
    const auto group = error_of([&] { engine.set_lr(2, 0.1); }, "group 2");
    require(contains(group, "expected 0 to 1"), group);
    const auto rate = error_of([&] { engine.set_lr(0, -1); }, "a negative rate");
    require(contains(rate, "at least 0"), rate);
    if (world() == 1) return;
    engine.backward(loss_of(*net, comm->rank(), 4));
    engine.set_lr(0, 0.1 * (1 + comm->rank()));
    const auto different = error_of([&] { engine.step(); }, "other rates on other ranks");
    require(contains(different, "set_lr() in the same way on every rank"), different);
  });
}

TEST(BackwardRates, ASchedulerAndSetLrExcludeEachOther) {
  auto net = make_net();
  Engine engine(net, Options::from_json(json_for(0, "SGD", 1, R"(, "scheduler": {"type": "WarmupLR", "params": {}})")),
                Communicator::local());
  const auto error = error_of([&] { engine.set_lr(0, 0.1); }, "set_lr");
  EXPECT_TRUE(contains(error, "scheduler")) << error;
}

}  // namespace
}  // namespace zero::test::backward_test
