// Scopes of gathered_parameters: nested, left open, and the calls that are allowed inside.
#include <torch/serialize.h>
#include <filesystem>

#include "soundness/small_programs.h"
#include "support/folder.h"

namespace zero::test::scopes_test {
namespace {

void train_once(Engine& engine, torch::nn::SequentialImpl& model, int seed = 0) {
  engine.backward(model.forward(small_input(seed)).pow(2).mean());
  engine.step();
}

TEST(Scopes, AModifyingOneInAnother) {
  for (const int world : {1, 2})
    for (const int stage : {0, 2, 3}) {
      SCOPED_TRACE(std::to_string(world) + " ranks, stage " + std::to_string(stage));
      const auto errors = errors_of_ranks(world, [&](std::shared_ptr<Communicator> comm) {
        auto model = small_model();
        Engine engine(model, small_options(stage), comm);
        const auto before = model->parameters()[0].detach().clone();
        {
          torch::NoGradGuard no_grad;
          auto outer = engine.gathered_parameters(true);
          {
            auto inner = engine.gathered_parameters(true);
            if (comm->rank() == 0) model->parameters()[0].mul_(2);
            inner.close();
          }
          {
            auto reading = engine.gathered_parameters();
            EXPECT_TRUE(torch::equal(model->parameters()[0], before * 2));
          }
          if (comm->rank() == 0) model->parameters()[0].mul_(3);
          outer.close();
        }
        EXPECT_TRUE(torch::equal(model->parameters()[0].detach(), before * 2 * 3));
        // Closed: writing is refused again.
        const auto masters = engine.full_state_dict();
        if (comm->rank() == 0) EXPECT_TRUE(torch::equal(masters.at("0.weight"), before * 2 * 3));
        train_once(engine, *model);
      });
      for (const auto& error : errors) EXPECT_EQ(error, "");
    }
  auto model = small_model();
  Engine engine(model, small_options(3), Communicator::local());
  {
    auto outer = engine.gathered_parameters(true);
    auto inner = engine.gathered_parameters();
  }
  torch::NoGradGuard no_grad;
  EXPECT_TRUE(contains(message_of([&] { model->parameters()[0].mul_(2); }), "gathered_parameters(true)"));
}

TEST(Scopes, CheckpointsInside) {
  for (const int world : {1, 2}) {
    const TempFolder folder;
    std::vector<std::string> saves(2), loads(2), loads_reading(2);
    const auto errors = errors_of_ranks(world, [&](std::shared_ptr<Communicator> comm) {
      const auto rank = static_cast<std::size_t>(comm->rank());
      auto model = small_model();
      Engine engine(model, small_options(2), comm);
      train_once(engine, *model);
      engine.save_checkpoint(folder.text(), "first");
      const auto hash = engine.state_hash();
      {
        auto scope = engine.gathered_parameters(true);
        saves[rank] = message_of([&] { engine.save_checkpoint(folder.text(), "inside"); });
        loads[rank] = message_of([&] { engine.load_checkpoint(folder.text(), "first"); });
        scope.close();
      }
      {
        auto scope = engine.gathered_parameters();
        engine.save_checkpoint(folder.text(), "reading");  // nothing is written in it
        loads_reading[rank] = message_of([&] { engine.load_checkpoint(folder.text(), "first"); });
        scope.close();
      }
      EXPECT_EQ(engine.state_hash(), hash);
      engine.load_checkpoint(folder.text(), "reading");
      EXPECT_EQ(engine.state_hash(), hash);
      train_once(engine, *model);
    });
    for (const auto& error : errors) EXPECT_EQ(error, "");
    for (int rank = 0; rank < world; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      EXPECT_TRUE(contains(saves[r], "inside a scope")) << saves[r];
      EXPECT_TRUE(contains(loads[r], "inside a scope")) << loads[r];
      EXPECT_TRUE(contains(loads_reading[r], "inside a scope")) << loads_reading[r];
    }
    EXPECT_FALSE(std::filesystem::exists(folder.text() + "/inside"));
  }
}

// torch::load replaces the parameters' tensors; the end of the scope reports it, not a later call.
TEST(Scopes, TorchLoadInside) {
  for (const int stage : {0, 3}) {
    const TempFolder folder;
    const auto file = folder.text() + "/model.pt";
    {
      auto other = small_model();
      torch::save(std::static_pointer_cast<torch::nn::Module>(other), file);
    }
    auto model = small_model();
    Engine engine(model, small_options(stage), Communicator::local());
    auto scope = engine.gathered_parameters(true);
    std::shared_ptr<torch::nn::Module> module = model;
    torch::load(module, file);
    const auto error = message_of([&] { scope.close(); });
    EXPECT_TRUE(contains(error, "torch::load")) << error;
    EXPECT_TRUE(contains(error, "copy_")) << error;
  }
}

}  // namespace
}  // namespace zero::test::scopes_test
