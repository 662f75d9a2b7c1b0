// Parameters that were frozen when the Engine was constructed and are unfrozen later: they train like parameters that
// were trainable, and then frozen, from the start.
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <filesystem>

#include "soundness/cases.h"
#include "support/folder.h"

namespace zero::test::unfreezing_test {
namespace {

class Unfreezing : public Everywhere {
 protected:
  static void freeze(Net& net, int step) {
    for (auto& p : net.layers[0]->parameters()) p.requires_grad_(step >= 2);  // a whole unit
    net.head->bias.requires_grad_(step >= 3);                                 // one member of a unit
  }
  static std::shared_ptr<Net> frozen_net() {
    auto net = make_net();
    freeze(*net, 0);
    return net;
  }
  static void train(Engine& engine, Net& net, int step, int accumulation = 1) {
    freeze(net, step);
    for (int micro = 0; micro < accumulation; ++micro) {
      const auto dtype = net.head->weight.scalar_type();
      const auto x = input_of(engine.communicator().rank(), step * accumulation + micro).to(dtype);
      engine.backward((net.forward(x).to(at::kFloat) - 0.5).pow(2).mean());
      engine.step();
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Everywhere, Unfreezing, ::testing::ValuesIn(all_cases()), name_of_case);

TEST_P(Unfreezing, AsIfTrainableFromTheStart) {
  const TempFolder temporary;
  const auto folder = temporary.text();
  const std::string in_host = R"(, "offload_optimizer": {"device": "cpu"})";
  struct Variant {
    std::string extra, zero;
    int accumulation, least_stage;
  };
  const Variant variants[] = {
      {"", "", 1, 0},
      {"", "", 2, 0},
      {R"(, "bf16": {"enabled": true})", "", 1, 0},
      {R"(, "gradient_predivide_factor": 4.0)", "", 1, 0},
      {"", in_host, 1, 1},
      {"", in_host + R"(, "delayed_update": {"enabled": true, "start_step": 1})", 1, 1},
      {"", R"(, "offload_param": {"device": "cpu"})", 1, 3},
      {"", in_host + R"(, "offload_param": {"device": "nvme", "nvme_path": ")" + folder + "\"}", 1, 3},
  };
  for (const auto& variant : variants) {
    if (stage() < variant.least_stage) continue;
    expect([&, this](const auto& comm) {
      const auto masters = [&](bool frozen_at_first) {
        auto net = make_net();
        const at::NoGradGuard no_grad;
        for (auto& p : net->parameters())
          p.copy_(p.to(at::kBFloat16));  // so that parameters equal their masters exactly
        if (frozen_at_first) freeze(*net, 0);
        Engine engine(net,
                      Options::from_json(json_for(stage(), "AdamW", variant.accumulation, variant.extra, variant.zero)),
                      comm);
        const at::AutoGradMode grad(true);
        for (int step = 0; step < 6; ++step) train(engine, *net, step, variant.accumulation);
        engine.flush();
        return engine.full_state_dict();
      };
      const auto ours = masters(true), expected = masters(false);
      for (const auto& [name, values] : expected)
        require(values.equal(ours.at(name)), name + " differs with" + variant.extra + variant.zero);
    });
  }
}

TEST_P(Unfreezing, AsThePlainLoop) {
  expect([this](const auto& comm) {
    auto net = frozen_net();
    Engine engine(net, Options::from_json(json_for(stage(), "AdamW")), comm);
    Plain plain(world(), "AdamW");
    for (int step = 0; step < 6; ++step) {
      train(engine, *net, step);
      freeze(plain.net(), step);
      plain.backward([&](Net& model, int rank) { return (model.forward(input_of(rank, step)) - 0.5).pow(2).mean(); });
      plain.step();
      require_equal(engine, plain.net(), "step " + std::to_string(step));
    }
  });
}

TEST_P(Unfreezing, AcrossCheckpoints) {
  expect([this](const auto& comm) {
    const auto folder = std::filesystem::temp_directory_path() / ("zero-unfrozen-" + std::to_string(getppid()));
    const auto make = [&](const std::shared_ptr<Net>& net) {
      return std::make_unique<Engine>(net, Options::from_json(json_for(stage(), "AdamW")), comm);
    };
    auto net = frozen_net();
    auto engine = make(net);
    for (int step = 0; step < 6; ++step) {
      if (step == 1) engine->save_checkpoint(folder, "frozen");
      if (step == 4) engine->save_checkpoint(folder, "unfrozen");
      train(*engine, *net, step);
    }
    const auto expected = engine->state_hash();
    for (const char* tag : {"frozen", "unfrozen"}) {
      const int begin = tag == std::string("frozen") ? 1 : 4;
      engine.reset();
      net = frozen_net();
      engine = make(net);
      if (begin == 4) {
        const auto text = error_of([&] { engine->load_checkpoint(folder, tag); }, "frozen, with a state to load");
        require(contains(text, "head.bias: frozen in the model, trained in the checkpoint") && contains(text, "Hint"),
                text);
        require(!contains(text, "exp_avg"), text);
      }
      freeze(*net, begin);
      engine->load_checkpoint(folder, tag);
      for (int step = begin; step < 6; ++step) train(*engine, *net, step);
      require(engine->state_hash() == expected, std::string("other states after loading ") + tag);
    }
    // Load a state from before unfreezing into an Engine that has trained the parameter.
    engine->load_checkpoint(folder, "frozen");
    for (int step = 1; step < 6; ++step) train(*engine, *net, step);
    require(engine->state_hash() == expected, "other states after going back");
    // Only rank 1 has unfrozen a parameter.
    if (world() > 1) {
      net = frozen_net();
      engine.reset();
      engine = make(net);
      if (comm->rank() == 1) freeze(*net, 4);
      const auto text = error_of([&] { engine->load_checkpoint(folder, "frozen"); }, "unfrozen on rank 1 alone");
      require(contains(text, "requires_grad_()") && contains(text, "rank 1"), text);
      freeze(*net, 1);
      engine->load_checkpoint(folder, "frozen");
      for (int step = 1; step < 6; ++step) train(*engine, *net, step);
      require(engine->state_hash() == expected, "other states after a refused load");
    }
    comm->barrier();
    if (comm->rank() == 0) std::filesystem::remove_all(folder);
  });
}

// The parameter belongs to the Engine before its first training step.
TEST_P(Unfreezing, PlainBackwardIsRefused) {
  expect([this](const auto& comm) {
    auto net = frozen_net();
    Engine engine(net, Options::from_json(json_for(stage(), "SGD")), comm);
    train(engine, *net, 0);
    freeze(*net, 4);
    const auto text = error_of([&] { net->head->bias.sum().backward(); }, "a plain backward");
    require(contains(text, "head.bias") && contains(text, "outside Engine::backward"), text);
    require(!net->head->bias.grad().defined(), "a plain gradient stayed");
  });
}

TEST_P(Unfreezing, OnOneRankIsNoticed) {
  if (world() == 1) return;
  const auto errors = run_at(GetParam().place, [this](const auto& comm) {
    auto net = frozen_net();
    const char* const extra = R"(, "libzero": {"timeout_s": 5})";
    Engine engine(net, Options::from_json(json_for(stage(), "SGD", 1, extra)), comm);
    train(engine, *net, 0);
    if (comm->rank() == 1) freeze(*net, 2);
    engine.backward(loss_of(*net, comm->rank(), 1));
    engine.step();
  });
  EXPECT_TRUE(contains(errors, "got another call on rank") || contains(errors, "different calls") ||
              contains(errors, "requires_grad_()"))
      << errors;
}

// If masters and optimizer states do not fit: an error, and training continues without the parameter.
TEST(UnfreezingWithoutRoom, IsRefused) {
  const auto make_model = [] {
    torch::nn::Sequential model(torch::nn::Linear(256, 256), torch::nn::Linear(256, 2));
    for (auto& p : model[0]->parameters()) p.requires_grad_(false);
    return model;
  };
  const TempFolder folder;
  std::uint64_t peak = 0;
  const std::string in_folder = R"({"device": "nvme", "nvme_path": ")" + folder.text() + "\"}";
  struct Variant {
    int least_stage;
    std::string zero, extra, budget;  // budget: a key of "memory", or none
    std::uint64_t above_peak;         // of a run that unfreezes nothing
    std::string expected;
  };
  const Variant variants[] = {
      {0, "", "", "device", 0, "memory.device"},
      // Room for the masters, but not for the optimizer states.
      {0, "", R"(, "bf16": {"enabled": true})", "device", 256 * 256 * 4, "memory.device"},
      {1, R"(, "offload_optimizer": )" + in_folder, "", "", 0, "requires_grad of parameter 0.weight"},
      {3, R"(, "offload_optimizer": {"device": "cpu"}, "offload_param": )" + in_folder, "", "host", 0, "memory.host"},
  };
  for (int stage = 0; stage <= 3; ++stage) {
    for (const auto& variant : variants) {
      if (stage < variant.least_stage) continue;
      const auto tier = variant.budget == "host" ? MemoryReport::Tier::Host : MemoryReport::Tier::Device;
      const auto train = [&](const std::string& memory, bool unfreezes) {
        torch::manual_seed(1);
        auto model = make_model();
        Engine engine(model.ptr(),
                      Options::from_json(json_for(stage, "AdamW", 1, variant.extra + memory, variant.zero)),
                      Communicator::local());
        for (int step = 0; step < 4; ++step) {
          const auto x = at::full({2, 256}, step, model[1]->as<torch::nn::Linear>()->weight.options());
          const auto loss = [&] { return model->forward(x).to(at::kFloat).pow(2).mean(); };
          if (step == 2 && unfreezes) {
            model[0]->as<torch::nn::Linear>()->weight.requires_grad_(true);
            const auto before = engine.memory().current(tier);
            const auto text = error_of([&] { engine.backward(loss()); }, "unfrozen without room");
            EXPECT_TRUE(contains(text, variant.expected)) << text;
            EXPECT_EQ(engine.memory().current(tier), before);
            model[0]->as<torch::nn::Linear>()->weight.requires_grad_(false);
          }
          engine.backward(loss());
          engine.step();
        }
        peak = engine.memory().peak(tier);
        return engine.state_hash();
      };
      const auto expected = train("", false);
      const auto budget =
          R"(, "memory": {")" + variant.budget + R"(": )" + std::to_string(peak + variant.above_peak) + "}";
      EXPECT_EQ(train(variant.budget.empty() ? "" : budget, true), expected);
    }
  }
}

}  // namespace
}  // namespace zero::test::unfreezing_test
