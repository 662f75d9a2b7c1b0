// A model that describes its forward and backward (PlanModel::pass), and the resulting plan.
#include "plan/model_pass.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include <zero/errors.h>
#include <zero/plan.h>

#include "plan/model.h"
#include "plan/pass.h"

namespace zero::planning::model_pass_test {
namespace {

using Describe = std::function<void(const PlanModel&, const PlanBatch&, PlanPass&)>;

PlanModel model_of(Describe pass) {
  PlanModel model{.kind = PlanModel::Kind::Gpt, .name = "", .layers = 2, .hidden = 8, .heads = 2};
  model.sequence = 4, model.vocabulary = 16;
  model.pass = std::move(pass);
  return model;
}

// Records all events.
class Recorder final : public PassSink {
 public:
  explicit Recorder(bool gpu = false) : gpu_(gpu) {}
  Tensor make(std::int64_t bytes) override {
    struct Counted final : PassTensor {
      Counted(Recorder& recorder, std::int64_t bytes) : recorder(recorder), bytes(bytes) {}
      ~Counted() override { recorder.lines.push_back("-" + std::to_string(bytes)); }
      Recorder& recorder;
      std::int64_t bytes;
    };
    lines.push_back("+" + std::to_string(bytes));
    return std::make_shared<Counted>(*this, bytes);
  }
  void put_away(Tier, std::int64_t bytes) override { lines.push_back("away " + std::to_string(bytes)); }
  void bring_back(Tier, std::int64_t bytes) override { lines.push_back("back " + std::to_string(bytes)); }
  using PassSink::use;
  void use(std::span<const std::size_t> parameters) override {
    std::string text = "use";
    for (const auto i : parameters) text += " " + std::to_string(i);
    lines.push_back(text);
  }
  void begin_backward() override { lines.push_back("backward"); }
  void gradient(std::size_t parameter, Tensor) override { lines.push_back("gradient " + std::to_string(parameter)); }
  void end_backward() override { lines.push_back("end"); }
  bool on_gpu() const override { return gpu_; }

  std::vector<std::string> lines;

 private:
  bool gpu_;
};

using Lines = std::vector<std::string>;

Lines run(const Describe& describe, const MicroBatch& batch = {}, bool gpu = false) {
  const auto model = model_of(describe);
  Recorder recorder(gpu);
  run_micro_batch(model, parameters_of(model), batch, recorder);
  return recorder.lines;
}

TEST(DescribedPass, IsToldAsItIs) {
  PlanBatch asked;
  const auto lines = run(
      [&](const PlanModel& model, const PlanBatch& batch, PlanPass& pass) {
        EXPECT_EQ(model.layers, 2);
        asked = batch;
        pass.use(0, 2);
        pass.allocate(0, 100);
        pass.allocate(1, 50);
        pass.release(1);
        pass.begin_backward();
        pass.gradient(1, 0);
        pass.end_backward();
      },
      {.samples = 3, .segments = 2, .element = 2});
  EXPECT_EQ(lines, (Lines{"use 0 1", "+100", "+50", "-50", "backward", "gradient 1", "-100", "end"}));
  EXPECT_EQ(asked.samples, 3);
  EXPECT_EQ(asked.segments, 2);
  EXPECT_EQ(asked.element, 2);
  EXPECT_FALSE(asked.gpu);
}

TEST(DescribedPass, InputsOfSegmentsWaitWhereTheConfigurationSays) {
  const Describe describe = [](const PlanModel&, const PlanBatch&, PlanPass& pass) {
    for (std::int64_t i = 0; i < 2; ++i) {
      pass.allocate(i, 10 + i);
      pass.begin_segment(i);
      pass.end_segment();
      pass.release(i);
    }
    pass.begin_backward();
    for (std::int64_t i = 2; i < 4; ++i) {
      pass.rerun_segment(i);
      pass.release(i);
    }
    pass.end_backward();
  };
  EXPECT_EQ(run(describe), (Lines{"+10", "+11", "backward", "-11", "-10", "end"}));
  EXPECT_EQ(run(describe, {.inputs = Tier::Host}), (Lines{"+10", "away 10", "-10", "+11", "away 11", "-11", "backward",
                                                          "+11", "back 11", "-11", "+10", "back 10", "-10", "end"}));
  EXPECT_EQ(run(describe, {.inputs = Tier::Host}, /*gpu=*/true),
            (Lines{"+10", "away 10", "-10", "+11", "away 11", "-11", "backward", "+11", "back 11", "+10", "back 10",
                   "-11", "-10", "end"}))
      << "a GPU fetches one segment ahead";
}

TEST(DescribedPass, NumbersThatCannotBeAreRefused) {
  const std::vector<std::function<void(PlanPass&)>> faults = {
      [](PlanPass& pass) { pass.use(1000, 1); },
      [](PlanPass& pass) { pass.use(0, 1000); },
      [](PlanPass& pass) { pass.allocate(1, 4); },
      [](PlanPass& pass) { pass.allocate(0, -4); },
      [](PlanPass& pass) { pass.release(0); },
      [](PlanPass& pass) { pass.begin_segment(0); },
      [](PlanPass& pass) { pass.end_segment(); },
      [](PlanPass& pass) { pass.rerun_segment(0); },
      [](PlanPass& pass) { pass.gradient(0, 0); },
      [](PlanPass& pass) {
        pass.allocate(0, 4);
        pass.gradient(1000, 0);
      },
      [](PlanPass& pass) {
        pass.allocate(0, 4);
        pass.release(0);
        pass.gradient(0, 0);
      },
  };
  for (std::size_t i = 0; i < faults.size(); ++i) {
    EXPECT_THROW(run([&](const PlanModel&, const PlanBatch&, PlanPass& pass) { faults[i](pass); }), ConfigError) << i;
  }
}

TEST(DescribedPass, GivesTheOrderOfUse) {
  const auto model = model_of([](const PlanModel&, const PlanBatch& batch, PlanPass& pass) {
    pass.use(0, 1);
    pass.use(2, 2);
    pass.begin_backward();
    for (std::int64_t i = 0; i < batch.segments; ++i) pass.use(4, 1);
    pass.end_backward();
  });
  using Order = std::vector<std::vector<std::size_t>>;
  const auto pass = pass_of(model, parameters_of(model), 2);
  EXPECT_EQ(pass.forward, (Order{{0}, {2, 3}}));
  EXPECT_EQ(pass.backward, (Order{{4}, {4}}));
  // Without one: the root, the units, the root; and back.
  const auto by_units = pass_of(model_of({}), parameters_of(model), 0);
  EXPECT_EQ(by_units.forward.size(), 4u);
  EXPECT_EQ(by_units.forward.front(), by_units.backward.front());
  EXPECT_EQ(by_units.forward[1], by_units.backward[2]);
}

}  // namespace
}  // namespace zero::planning::model_pass_test
